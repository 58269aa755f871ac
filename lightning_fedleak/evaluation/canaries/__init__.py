"""A user's own canary texts, in the training data or not by a fair draw."""

from lightning_fedleak.evaluation.canaries.dataset import CanarySet as CanarySet
from lightning_fedleak.evaluation.canaries.dataset import ReferenceRows as ReferenceRows
from lightning_fedleak.evaluation.canaries.dataset import draw_references as draw_references
from lightning_fedleak.evaluation.canaries.dataset import halves as halves
from lightning_fedleak.evaluation.canaries.dataset import new_token_canaries as new_token_canaries
from lightning_fedleak.evaluation.canaries.dataset import sampled_canaries as sampled_canaries
from lightning_fedleak.evaluation.canaries.dataset import with_canaries as with_canaries
from lightning_fedleak.evaluation.canaries.entities import EntityDataset as EntityDataset
from lightning_fedleak.evaluation.canaries.entities import EntitySet as EntitySet
from lightning_fedleak.evaluation.canaries.entities import with_entities as with_entities
from lightning_fedleak.evaluation.canaries.left_out import TrainingRows as TrainingRows
from lightning_fedleak.evaluation.canaries.left_out import leave_out as leave_out
from lightning_fedleak.evaluation.canaries.record import InclusionRecord as InclusionRecord
