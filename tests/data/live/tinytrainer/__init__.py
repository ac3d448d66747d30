from .args import TrainingArguments
from .trainer import Trainer
