"""The options of ``fedleak``'s subcommands, and their parser.

Each function named after a command adds its options; its docstring is the command's help. The
module imports neither torch nor the attacks, so that help is printed quickly.
"""

import argparse
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from lightning_fedleak.cli.studies import demo_settings

INVERT_ATTACKS = ("prefix", "sweeps", "descent", "paper")
"""The values of ``--attack`` of ``fedleak invert``."""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return " (did you mean 'x'?)" with the most similar name; empty if none is similar."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


PHRASES = {
    "sources": "a .jsonl, .json, .csv, .tsv, .parquet or text file, a folder of .txt files, or a "
    "dataset of the hub as name:config:split:column",
    "targets": "modules with a LoRA, with commas between (q_proj,v_proj), or all-linear; by "
    "default PEFT's for this model",
}
"""Help texts that several options share; a docstring inserts one by its name in braces."""

Add = Callable[..., None]
"""``argparse``'s ``add_argument``, except that ``help`` is taken from the command's docstring."""


def _converter(
    parse: Callable[[str], float], is_valid: Callable[[float], bool], description: str
) -> Callable[[str], float]:
    """Return a function that parses a number, and refuses one for which ``is_valid`` is false.

    The error message says that the number is not ``description``, such as "a positive number".
    """

    def convert(text: str) -> float:
        try:
            value = parse(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not {description}")
        return value

    return convert


_to_share = _converter(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
_to_positive = _converter(float, lambda x: 0 < x < float("inf"), "a positive number")
_to_duration = _converter(float, lambda x: x > 0, "a positive number")  # "inf": without end
_to_non_negative = _converter(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
_to_uint32 = _converter(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295")


def _number_option(
    metavar: str, convert: Callable[[str], float], default: float | Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the arguments of ``add`` for an option that is a number."""
    return {"default": default, "metavar": metavar, "type": convert}


_SEED = _number_option("N", _to_uint32, 0)
# Choices of --metric that bound a true-positive rate; "shown" is the lower bound at 1% FPR.
_TPR_METRICS = ("shown", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001")
# All choices of ``fedleak memorization --metric``, explained in the docstring of the command.
_METRICS = ("auc", *_TPR_METRICS, "extracted", "greedy", "at_least", "prompts")


def _parse_limit(text: str) -> tuple[str | None, float]:
    """Return metric and limit of ``METRIC=X``, or None and the limit of a plain ``X``."""
    metric, has_metric, number = text.rpartition("=")
    if has_metric and metric not in _METRICS and not metric.startswith("entity/"):
        raise argparse.ArgumentTypeError(f"'{metric}' is none of {', '.join(_METRICS)}")
    return metric or None, _to_non_negative(number)


def count_option(default: int | list[int] | None, minimum: int = 1) -> dict[str, Any]:
    """Return the arguments of ``add`` for an option that is a whole number."""
    text = f"a whole number of at least {minimum}"
    return _number_option("N", _converter(int, lambda n: n >= minimum, text), default)


def path_option(metavar: str, default: str | None = None) -> dict[str, Any]:
    """Return the arguments of ``add`` for an option that is a file or a folder."""
    return {"default": None if default is None else Path(default), "metavar": metavar, "type": Path}


def _add_sources(add: Add) -> None:
    """Add the options of a model and of a private text."""
    add("--model", metavar="NAME")
    add("--text", metavar="SOURCE")
    add("--column", metavar="NAME")


def _add_rows(add: Add) -> None:
    """Add the options that ``memorization`` and ``synthetic`` share."""
    add("--base", required=True, metavar="NAME")
    add("--column", metavar="NAME")
    add("--prompt-column", metavar="NAME")
    add("--loss", choices=("answers", "all"))
    add("--length", **count_option(256, 2))
    add("--drawn", action="store_true")
    add("--summary", **path_option("FILE"))
    add("--out", **path_option("FILE"))


def demo(add: Add) -> None:
    """Fine-tune a small model on private messages and watch them leak.

    Fine-tunes a language model on private text three times, and attacks its updates: without a
    defence, under DP-SGD, and with a gate that stops the training. It shows how much the attacks
    recover of words, membership and whole texts, what the trained weights memorised, and what the
    defence costs. A model and texts are included; use your own with --model and --text.

    Options:
        model: causal language model: a folder or a name on the hub.
        text: private text: {sources}.
        column: the column of --text that holds the text.
        steps: optimizer steps of a run.
        batch_size: texts a batch.
        length: tokens a text, at most.
        every_n_steps: steps between two measurements of the leakage.
        at_most: word leakage (F1) above which the gate stops the third run.
        lr: learning rate of AdamW.
        out: folder of the logs.
        seed: seed of split, order, dropout and of the calibration of the attacks.
        reveal: also write the recovered words to a local file that only you can read.
    """
    _add_sources(add)
    sizes = demo_settings
    add("--steps", **count_option(sizes.STEPS))
    add("--batch-size", **count_option(sizes.BATCH_SIZE))
    add("--length", **count_option(sizes.LENGTH, 2))
    add("--every-n-steps", **count_option(sizes.EVERY_N_STEPS))
    add("--lr", **_number_option("X", _to_positive, sizes.LR))
    add("--at-most", **_number_option("F1", _to_share, 0.5))
    add("--out", **path_option("DIR", "fedleak_runs"))
    add("--seed", **_SEED)
    add("--reveal", action="store_true")


def invert(add: Add) -> None:
    """Recover, as the server, a client's texts from the hidden states that it sends.

    Runs the first blocks of a model on texts, as the client of split learning does, adds Gaussian
    noise to the hidden states that the client would send, and recovers the texts from them (Zheng
    2023). It also measures how much accuracy the noise costs the model. A model and texts are
    included; use your own with --model and --text.

    Options:
        model: language model: a folder or a name on the hub.
        text: the client's text: {sources}.
        column: the column of --text that holds the text.
        layer: numbers of the blocks whose output the client sends, 0 for the embeddings; by
            default at a third and two thirds of the model.
        noise: standard deviations of the noise.
        relative: --noise is in units of the standard deviation of each dimension of the hidden
            states; otherwise it is absolute.
        lengths: tokens a text; several numbers are measured separately.
        texts: texts attacked for each combination of attack, layer, length and noise.
        attack: by default 'prefix' for causal models, 'sweeps' (descent with verified changes) for
            encoders.
        steps: gradient steps of a descent, at most.
        budget_seconds: about the time of an attack on the texts of one combination, counted as
            work, after which its best result so far counts; 'inf' for no bound.
        bos: token id put before every text.
        seed: seed of the choice of texts and of the noise.
        out: folder of the results.
    """
    _add_sources(add)
    add("--layer", nargs="+", **count_option(None, 0))
    add("--noise", nargs="+", **_number_option("S", _to_non_negative, [0.0, 0.3, 1.0, 3.0]))
    add("--relative", action=argparse.BooleanOptionalAction, default=True)
    add("--lengths", nargs="+", **count_option([32]))
    add("--texts", **count_option(4))
    add("--attack", nargs="+", choices=INVERT_ATTACKS)
    add("--steps", **count_option(1000))
    add("--budget-seconds", **_number_option("X", _to_duration, 60.0))
    add("--bos", **count_option(None, 0))
    add("--seed", **_SEED)
    add("--out", **path_option("DIR", "fedleak_runs/inversion"))


def plan(add: Add) -> None:
    """Estimate, before any training, what an update can reveal and what the attacks on it cost.

    Counts the rows of an update that reveal which tokens are in a batch (rows of a LoRA, or of the
    whole first block), and how many of randomly drawn tokens they reveal. Then it prints the costs
    of each attack that a run would choose. A model is included; use your own with --model. Time and
    memory are estimated for one device and for several; that needs only a folder's config.json.

    Options:
        model: language model: a folder or a name on the hub.
        batch: texts of a process's batch, and tokens of each.
        lora_r: rank of the LoRA; 0 for the whole model.
        targets: {targets}.
        seed: seed of the adapters and of the random sets of tokens.
    """
    add("--model", metavar="NAME")
    add("--batch", default="8x64", metavar="NxL", type=_parse_batch)
    add("--lora-r", **count_option(8, 0))
    add("--targets", metavar="NAMES")
    add("--seed", **_SEED)


def _parse_batch(text: str) -> tuple[int, int]:
    """Return the number of texts and the tokens per text, parsed from text such as ``4x512``."""
    texts, x, length = text.partition("x")
    if not (x and texts.isdecimal() and length.isdecimal() and int(texts) * int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not texts x tokens, such as 4x512")
    return int(texts), int(length)


def memorization(add: Add) -> None:
    """Measure what a trained model leaks of its training texts, before it is released.

    Queries the trained model and its base with texts that were trained on and texts that were not,
    and shows how well they can be distinguished and which of them the model would write. Each
    text costs two forward passes, 14 for a masked model; nothing is generated. Classifiers of texts
    and of tokens, and masked models, are recognised by the architectures in the config of --model.

    Options:
        model: the trained model: a folder, or one with adapters of PEFT.
        base: the model that the training began from: a folder or a name on the hub.
        members: texts that were trained on: {sources}.
        others: non-members: similar texts that were not trained on, in one of the same forms.
        column: the column of --members and --others that holds the text, or the answer to a prompt.
        prompt_column: the column of prompts, which the loss was not computed on. Prompt and answer
            are joined as TRL does it, with an end-of-text token. Chats (messages) are rendered with
            the model's template; rows of input_ids and labels are used unchanged.
        label_column: for a classifier: the column of classes, as numbers or names. A classifier of
            tokens needs a list of words in --column, and as many classes in this column.
        loss: the tokens that training's loss was computed on: those of the answers or the
            assistant's turns (answers), or all. Chats need it.
        length: tokens of a text, at most, as in training.
        drawn: the non-members were drawn at random from the same rows (leave_out), so that members
            and non-members are exchangeable.
        records: private file to write, which ranks the members by how much the model leaks of them:
            it holds row numbers and p-values, and no text. See fedleak records.
        entities: kinds of personal data to find in the texts, separated by commas: phone, email,
            iban, card, date, code, or a file with a value in each line. Values in members are
            compared with values in non-members, by kind and position in the text.
        reference: a model that was trained like --model on other texts of the same kind, and on no
            text of --members and --others: a folder, or one with adapters of PEFT. Texts are also
            scored relative to this model (attack combined_reference). Several may be given; they
            may have seen texts by a draw that --reference-rows names.
        reference_rows: for each --reference, how many rows it was trained on, or the file of these.
            If they are fewer than --members, a low result of combined_reference counts as unknown.
        references: train this number of reference models, each on half of members and non-members,
            and also score texts relative to them, as with --reference and --reference-rows. Each
            costs a training. Needs --drawn. Prompts are scored without them.
            Their outputs are saved in private files next to --records.
        run: folder with the run.jsonl of the training, whose hashes must be those of --model. It
            gives the references' learning rate, epochs and optimizer. References are refused if it
            was trained with differential privacy.
        epochs: epochs of a reference, if run.jsonl does not hold them.
        batch_size: rows of an optimizer step in the training.
        lr: learning rate of a reference, which is constant.
        no_account: states that the rows were trained on without differential privacy.
        metric: what --at-most limits: the AUC; the TPR at 1% or 0.1% FPR; the lower bound of the
            TPR at 1% FPR (shown); how much more often members than non-members are extracted in
            samples (extracted) or greedily (greedy); with --records the lower bound of the number
            of rows that leak (at_least); or the AUC of prompts, which have no loss (prompts).
        at_most: exit with status 3 if the metric's interval reaches above this number, or if the
            metric is unknown. May be repeated, as 0.6 for --metric, or as extracted=0.05, or with
            --entities as entity/phone/label=0.6.
        summary: file that a table in Markdown is added to, such as the summary of a CI job. It
            holds no texts and no row numbers.
        out: file of the result as JSON.
        dtype: the type of all weights and outputs when the models are queried, on a GPU if there is
            one. float32 by default.
    """
    add("--model", required=True, metavar="DIR")
    add("--members", required=True, metavar="SOURCE")
    add("--others", required=True, metavar="SOURCE")
    _add_rows(add)
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--label-column", metavar="NAME")
    add("--records", **path_option("FILE"))
    add("--entities", metavar="KINDS", type=lambda text: text.split(","), default=())
    add("--reference", metavar="DIR", nargs="+")
    add("--reference-rows", metavar="N|FILE", nargs="+")
    add("--references", **count_option(0, 0))
    add("--run", **path_option("DIR"))
    add("--epochs", **count_option(None))
    add("--batch-size", **count_option(None))
    add("--lr", **_number_option("X", _to_positive))
    add("--no-account", action="store_true")
    add("--metric", choices=_METRICS, default="auc")
    add("--at-most", action="append", metavar="X", type=_parse_limit)


def synthetic(add: Add) -> None:
    """Measure what texts that a fine-tuned model wrote leak of its training rows.

    Fits a small auxiliary model on the generated texts, and queries it and its base with rows that
    were trained on and rows that were held out. It also counts passages of rows that the generated
    texts contain word for word. The model that wrote them is not needed.

    Options:
        rows: rows that the model was trained on: {sources}.
        others: non-members: similar rows that were not trained on, in one of the same forms.
        generated: texts that the model wrote, in one of the same forms.
        base: causal language model from which the auxiliary model is fine-tuned: a folder or a name
            on the hub. The base of the model that wrote the texts is a good choice.
        column: the column of --rows and --others that holds the text, or the answer to a prompt.
        prompt_column: the column of prompts, which are not compared.
        loss: the tokens that are compared: those of the answers or the assistant's turns (answers),
            or all. Chats need it.
        generated_column: the column of --generated that holds the text; by default --column and
            --prompt-column, as for the rows.
        length: tokens of a text, at most.
        drawn: the non-members were drawn at random from the same rows (leave_out), so that members
            and non-members are exchangeable.
        epochs: passes of the auxiliary model over the generated texts.
        batch_size: texts of an optimizer step.
        lr: learning rate of AdamW, which is constant.
        lora_r: fit a LoRA of this rank; 0: the whole model.
        targets: {targets}.
        seed: seed of order, dropout and adapters.
        metric: what --at-most limits of each score: the AUC, the TPR at 1% or 0.1% FPR, or the
            lower bound of the TPR at 1% FPR (shown).
        at_most: exit with status 3 if the interval of the auxiliary model's score, or of a score
            that counts copied passages, reaches above this number, or if one of them is unknown.
        summary: file that a table in Markdown is added to. It holds no texts and no row numbers.
        out: file of the result as JSON.
    """
    for name in ("--rows", "--others", "--generated"):
        add(name, required=True, metavar="SOURCE")
    _add_rows(add)
    add("--generated-column", metavar="NAME")
    add("--epochs", **count_option(1))
    add("--batch-size", **count_option(8))
    add("--lr", **_number_option("X", _to_positive, 2e-4))
    add("--lora-r", **count_option(0, 0))
    add("--targets", metavar="NAMES")
    add("--seed", **_SEED)
    add("--metric", choices=("auc", *_TPR_METRICS), default="auc")
    add("--at-most", **_number_option("X", _to_share))


def records(add: Add) -> None:
    """Show the training rows that a trained model leaks, or drop them.

    Reads a list of row numbers that a monitor (Memorization(records=True)) or fedleak memorization
    --records wrote. Dropping rows protects only those rows, and uses up the held-out rows: hold out
    a new random draw before training again. Dropping is refused if the run had differential
    privacy, and if the list was made from too few texts.

    Options:
        action: show prints the riskiest rows on a terminal; drop writes all other rows to --out.
        file: the list, of mode 0600.
        data: the rows that the list numbers, given to leave_out or as --members: {sources}.
        column: the column to show; by default all columns.
        top: share of the scored rows to show or drop, riskiest first. Copies come before other
            rows, all of them or none.
        no_account: states that the rows were trained on without differential privacy, which a list
            of fedleak memorization does not record.
        out: .jsonl file for the rows that drop keeps, of mode 0600.
    """
    add("action", choices=("show", "drop"))
    add("file", metavar="FILE", type=Path)
    add("--data", required=True, metavar="SOURCE")
    add("--column", metavar="NAME")
    add("--top", **_number_option("X", _to_share, 0.1))
    add("--no-account", action="store_true")
    add("--out", **path_option("FILE"))


def fit(add: Add) -> None:
    """Fine-tune any causal language model on any text, configured by LightningCLI.

    These are the settings that most runs need. LightningCLI takes all other settings of the model,
    the data and the Trainer; --print_config lists them with their values. Lists and classes
    (callbacks, strategy) are best written in a config: see examples/finetune.yaml and the recipes.

    Options:
        config: settings in YAML, with the keys model, data, trainer; several are merged.
        recipe: append a ready-made config: monitors, gates or a defence (once for each).
        print_config: print all settings and exit.
        model_model: a folder or a name on the hub; by default a small one that is included.
        model_lr: learning rate of AdamW.
        model_peft: train adapters (lora) or the biases alone (bitfit); by default the whole model.
        model_loss: mean over all tokens of a batch (token_mean), or mean over texts of the mean
            over each text's tokens (sample_mean), which DP-SGD needs.
        data_text: private text: {sources}; by default messages that are included.
        data_column: the column of the text.
        data_batch_size: texts a batch.
        data_length: tokens a row, at most.
        trainer_max_steps: optimizer steps.
        trainer_devices: number of devices.
        trainer_callbacks_help: print the settings of a callback, such as LeakageMonitor, and exit.
    """
    add("--config", metavar="FILE")
    add("--recipe", metavar="NAME")
    add("--print_config", action="store_true")
    add("--model.model", metavar="NAME")
    add("--model.lr", metavar="X", default=1e-4)
    add("--model.peft", choices=("lora", "bitfit"))
    add("--model.loss", choices=("token_mean", "sample_mean"), default="token_mean")
    add("--data.text", metavar="SOURCE")
    add("--data.column", metavar="NAME")
    add("--data.batch_size", metavar="N", default=8)
    add("--data.length", metavar="N", default=64)
    add("--trainer.max_steps", metavar="N")
    add("--trainer.devices", metavar="N")
    add("--trainer.callbacks.help", metavar="CLASS")


def report(add: Add) -> None:
    """Write what runs showed: a page for people, and JSON.

    Reads the log folders of runs (lightning_logs/version_0, fedleak_runs/...), and writes
    report.html and report.json.

    Options:
        runs: folder of logs.
        out: folder of the report (default: the first RUN's). A report.toml in it may describe how
            the model is released, which the logs do not hold.
        model_card: print a block of Markdown for a model card, and write no report. With --out,
            the folder of the weights, its content is also written there as leakage.json.
        reveal: local files of recovered text to put into the page. They hold private text; the
            page gets mode 0600.
    """
    add("runs", nargs="+", metavar="RUN", type=Path)
    add("--out", **path_option("DIR"))
    add("--model-card", action="store_true")
    add("--reveal", nargs="+", metavar="FILE", type=Path, default=[])


def compare(add: Add) -> None:
    """Print what changed between runs.

    Prints utility, leakage with 95% intervals, and epsilon of runs side by side.

    Options:
        runs: folder of logs; every run in it is compared.
    """
    add("runs", nargs="+", metavar="RUN", type=Path)


def verify(add: Add) -> None:
    """Check that nobody edited the logs of a run.

    Reads leakage.jsonl, run.jsonl and report.json. The exit status is 0 if every check holds, 3 if
    a check finds a contradiction, and 2 if a check cannot be decided: the run did not end, lines
    have no hashes, or the report is of another version.

    Options:
        run: folder that holds leakage.jsonl.
        weights: saved weights, whose hash must be in the logs: at the end of the last run, or at a
            checkpoint. A leakage.json next to them must agree with the logs.
        head: hash of a line, which you kept when the run ended; may be given several times.
        repetition: folder of a repetition of the same training: weights, losses and leakage must
            be the same to the last bit.
    """
    add("run", metavar="RUN", type=Path)
    add("--weights", **path_option("DIR"))
    add("--repetition", **path_option("DIR"))
    add("--head", action="append", default=[], metavar="HASH")


_COMMANDS = (
    *(demo, fit, plan, memorization, synthetic),
    *(records, invert, report, compare, verify),
)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default in ("", [])
        return action.help if empty else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; ``command`` holds the name of the subcommand.

    An error in the command line ends the program with status 2.

    Args:
        arguments: The words of the command line, without the program's name.
    """
    return parsers()[0].parse_args(arguments)


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parsers of the subcommands by their names."""
    fedleak = _Parser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client reveal.",
    )
    fedleak.add_argument("--version", action="version", version=version("lightning-fedleak"))
    names = ",".join(add_options.__name__ for add_options in _COMMANDS)
    commands = fedleak.add_subparsers(required=True, dest="command", metavar=f"{{{names}}}")
    for add_options in _COMMANDS:
        summary, description, helps = _parse_docstring(add_options)
        command = commands.add_parser(
            add_options.__name__, help=summary, description=description, formatter_class=_Help
        )

        def add(name: str, **arguments: Any) -> None:
            key = re.sub(r"\W", "_", name.lstrip("-"))
            command.add_argument(name, help=helps[key], **arguments)  # noqa: B023  (called here)

        add_options(add)
    return fedleak, commands.choices


def _parse_docstring(add_options: Callable[[Add], None]) -> tuple[str, str, dict[str, str]]:
    """Return the summary and the description of a command, and the help of each of its options.

    All three are parsed from the docstring of the function that adds the options.
    """
    text, _, options_text = (inspect.getdoc(add_options) or "").partition("\n\nOptions:\n")
    summary, _, description = text.partition("\n\n")
    _, *fields = re.split(r"^    (\w+): ", options_text, flags=re.MULTILINE)
    names, entries = fields[::2], fields[1::2]
    sentences = (" ".join(entry.split()).removesuffix(".") for entry in entries)
    helps = (sentence.format_map(PHRASES).replace("%", "%%") for sentence in sentences)
    summary = (summary[:1].lower() + summary[1:]).removesuffix(".")
    return summary, description, dict(zip(names, helps, strict=True))
