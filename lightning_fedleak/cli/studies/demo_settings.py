"""The settings of ``fedleak demo``, chosen so that it takes little time and still shows leaks.

A look is one measurement of a training step by the attacks.
"""

# Defaults of the command's options.
STEPS = 24  # optimizer steps of a run: nearly three epochs, which the weights then show
EVERY_N_STEPS = 12  # steps between two looks: two looks give membership games an interval
BATCH_SIZE = 16  # texts; with fewer, recovering the words is too easy
LENGTH = 48  # tokens of a text, at most: most messages are shorter
LR = 1e-3  # learning rate of AdamW: high enough that 24 steps change the validation loss

# Settings without an option.
ROWS = 144  # texts that are trained on, at most; as many are held out to compare with
CALIBRATION_TOKENS = 4_000  # tokens for AlignedFlatChat; 12,000 take 5 s more and find no more
GAMES = 16  # texts of a batch in the membership games of a look, and as many held-out texts
TEXTS = 8  # texts of a batch that are inverted at a look; with 2 the interval would begin at 0.16
INVERSION_SECONDS = 20.0  # time limit for the texts of a look; the embedded model takes 2 s
WEIGHTS_OVERHEAD = 100.0  # time for testing the weights, in epochs: enough to query all rows
LONG_ROWS = 105  # rows of 9 tokens or more on each side: 100 are needed, and repeats are excluded
MAX_GRAD_NORM = 1.0  # clip norm of DP-SGD, the usual one
EPSILON = 2.0  # epsilon of DP-SGD; at 8 A_FC still recognized members, with an AUC of 0.96
