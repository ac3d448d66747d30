"""Base classes and value types of all sections of the configuration."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from shakedown.core.paths import expand_home
from shakedown.progress.patience import Patience

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Coefficient = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
# A folder's name: file systems end at 255 bytes, and names are put together.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
# A path, or the name of something; no shell expands a `~` in YAML.
Place = Annotated[str, AfterValidator(expand_home)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict base: an unknown key or a wrong type is an error, never ignored."""

    # JSON, by which every part of a run gets its settings, cannot represent infinite numbers.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SupervisedStage(Section):
    """Keys of every stage: it runs on `nodes`, is watched, and is rerun with more debug output."""

    nodes: Positive = 1
    stall_timeout: Seconds = Patience.step
    start_timeout: Seconds = Patience.phase
    debug: Literal["off", "info", "detail", "blocking"] = "off"

    @property
    def patience(self) -> Patience:
        """The patience with its components, until the length of their steps is known."""
        return Patience(step=self.stall_timeout, phase=self.start_timeout)
