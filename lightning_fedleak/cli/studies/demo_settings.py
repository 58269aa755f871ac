"""The settings that make the demo short: where the processor's time goes, and what it buys."""

# Options of the command: their defaults.
STEPS = 24  # optimizer steps of a run: nearly three epochs, which the weights then show
EVERY_N_STEPS = 12  # steps between two looks: two looks give membership games an interval
BATCH_SIZE = 16  # texts: large enough that words are not a matter of course
LENGTH = 48  # tokens of a text, at most: most messages are shorter
LR = 1e-3  # of AdamW: so high that 24 steps change the validation loss

# What options do not set.
ROWS = 144  # texts that are trained on, at most; as many more are left out to compare with
CALIBRATION_TOKENS = 4_000  # of AlignedFlatChat: at 12,000 it reads as much, 5 s later
GAMES = 16  # texts of a batch that membership attacks are asked about at a look, and as many others
TEXTS = 8  # texts of a batch that are inverted at a look: of 2 the interval would begin at 0.16
INVERSION_SECONDS = 20.0  # for the texts of one look; the embedded model takes some 2 s
WEIGHTS_OVERHEAD = 100.0  # epochs' time: pays for asking the trained weights about all rows
LONG_ROWS = 105  # rows of 9 tokens or more on each side: 100 are needed, and repeats are left out
MAX_GRAD_NORM = 1.0  # C of DP-SGD, the usual one
EPSILON = 2.0  # of the run under DP-SGD: at 8 A_FC still recognized members, with an AUC of 0.96
