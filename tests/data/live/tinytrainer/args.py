from dataclasses import dataclass


@dataclass
class TrainingArguments:
    output_dir: str = "/tmp/live-textclf"
    max_steps: int = 100000
    logging_steps: int = 10
    eval_steps: int = 40
    save_steps: int = 60
    learning_rate: float = 1e-3
    per_device_train_batch_size: int = 16
