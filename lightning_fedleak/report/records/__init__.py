"""The log files of a run: the lines of ``leakage.jsonl`` and ``run.jsonl``, read and written.

``leakage.jsonl`` has the results of attacks, ``run.jsonl`` the set-up and the events of the run.
"""

from lightning_fedleak.report.records.fields import BEFORE as BEFORE
from lightning_fedleak.report.records.fields import JsonObject as JsonObject
from lightning_fedleak.report.records.fields import Releases as Releases
from lightning_fedleak.report.records.fields import append_line as append_line
from lightning_fedleak.report.records.fields import as_json as as_json
from lightning_fedleak.report.records.fields import closing_of as closing_of
from lightning_fedleak.report.records.fields import hash_line as hash_line
from lightning_fedleak.report.records.fields import holds_own_hash as holds_own_hash
from lightning_fedleak.report.records.fields import named as named
from lightning_fedleak.report.records.fields import split_lines as split_lines
from lightning_fedleak.report.records.files import RECORD as RECORD
from lightning_fedleak.report.records.files import RESULTS as RESULTS
from lightning_fedleak.report.records.files import by_reason as by_reason
from lightning_fedleak.report.records.files import parse_json as parse_json
from lightning_fedleak.report.records.files import read_lines as read_lines
from lightning_fedleak.report.records.lines import HIGH as HIGH
from lightning_fedleak.report.records.lines import NOT_PLAYED as NOT_PLAYED
from lightning_fedleak.report.records.lines import STRENGTH as STRENGTH
from lightning_fedleak.report.records.lines import WEAK as WEAK
from lightning_fedleak.report.records.lines import WEAK_REFERENCE as WEAK_REFERENCE
from lightning_fedleak.report.records.lines import CheckpointLine as CheckpointLine
from lightning_fedleak.report.records.lines import EndLine as EndLine
from lightning_fedleak.report.records.lines import GateLine as GateLine
from lightning_fedleak.report.records.lines import Judgement as Judgement
from lightning_fedleak.report.records.lines import LookLine as LookLine
from lightning_fedleak.report.records.lines import MetricsLine as MetricsLine
from lightning_fedleak.report.records.lines import MetricValue as MetricValue
from lightning_fedleak.report.records.lines import PlanLine as PlanLine
from lightning_fedleak.report.records.lines import PoolLine as PoolLine
from lightning_fedleak.report.records.lines import ReferenceFacts as ReferenceFacts
from lightning_fedleak.report.records.lines import ResultLine as ResultLine
from lightning_fedleak.report.records.lines import RunLine as RunLine
from lightning_fedleak.report.records.lines import Spending as Spending
from lightning_fedleak.report.records.lines import default_limit as default_limit
from lightning_fedleak.report.records.lines import judge_value as judge_value
from lightning_fedleak.report.records.setup import CANARIES as CANARIES
from lightning_fedleak.report.records.setup import ENTITIES as ENTITIES
from lightning_fedleak.report.records.setup import MEMBERSHIP as MEMBERSHIP
from lightning_fedleak.report.records.setup import MEMORIZATION as MEMORIZATION
from lightning_fedleak.report.records.setup import PLANTED as PLANTED
from lightning_fedleak.report.records.setup import STANDARD_FAMILIES as STANDARD_FAMILIES
from lightning_fedleak.report.records.setup import TEXTS as TEXTS
from lightning_fedleak.report.records.setup import WORDS as WORDS
from lightning_fedleak.report.records.setup import AttackFacts as AttackFacts
from lightning_fedleak.report.records.setup import BeginLine as BeginLine
from lightning_fedleak.report.records.setup import DefenseFacts as DefenseFacts
from lightning_fedleak.report.records.setup import DefenseLine as DefenseLine
from lightning_fedleak.report.records.setup import Family as Family
from lightning_fedleak.report.records.setup import GateFacts as GateFacts
from lightning_fedleak.report.records.setup import ModelFacts as ModelFacts
from lightning_fedleak.report.records.setup import MonitorFacts as MonitorFacts
from lightning_fedleak.report.records.setup import NotPlayed as NotPlayed
from lightning_fedleak.report.records.setup import standard_family as standard_family
