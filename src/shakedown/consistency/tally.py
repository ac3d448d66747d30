"""The tally of a comparison while its parts go by: sums of all samples, tokens of some."""

import heapq
from collections.abc import Sequence

import numpy as np

from shakedown.consistency.accuracy import Paired
from shakedown.consistency.bootstrap import SampleSums
from shakedown.consistency.compare import Aligned, align
from shakedown.consistency.greedy import GreedyDivergence
from shakedown.consistency.logprobs import BadTokens
from shakedown.consistency.part import Answers, ComparedSample
from shakedown.consistency.samples import Failure
from shakedown.core.verdict import Finding

_SHOWN = 100_000  # limit of tokens kept for factors, drawings and context
_WORST = 20  # samples with the largest differences, which always stay


class Shown:
    """A selection of samples: all until there are too many tokens, then every second, every fourth,
    ...

    The samples with the largest |t - g| stay: the worst tokens are those of the whole comparison.
    """

    def __init__(self, room: int = _SHOWN) -> None:
        self._room, self._step, self._seen, self._tokens = room, 1, 0, 0
        self._samples: dict[int, ComparedSample] = {}
        self._worst: list[tuple[float, int]] = []  # a heap, the smallest first

    @property
    def samples(self) -> list[ComparedSample]:
        return [self._samples[number] for number in sorted(self._samples)]

    def add(self, sample: ComparedSample, largest: float) -> None:
        """`largest`: its largest |t - g|, in nats."""
        number, self._seen = self._seen, self._seen + 1
        self._samples[number] = sample
        self._tokens += len(sample.completion.token_ids)
        heapq.heappush(self._worst, (largest, number))
        if len(self._worst) > _WORST:
            _, other = heapq.heappop(self._worst)
            self._drop([other])
        while self._tokens > self._room and len(self._samples) > len(self._worst) + 1:
            self._step *= 2
            worst = {number for _, number in self._worst}
            self._drop([each for each in self._samples if each not in worst])

    def _drop(self, numbers: Sequence[int]) -> None:
        """Drop the samples that no step selects."""
        for number in numbers:
            if number % self._step and number in self._samples:
                self._tokens -= len(self._samples.pop(number).completion.token_ids)


class Tally:
    """An accumulator of parts; memory grows by a row of sums per sample and eight bytes per
    token."""

    def __init__(self) -> None:
        self.engine = ""
        self.sums, self.shown, self.bad = SampleSums(), Shown(), BadTokens()
        self.samples = 0
        self.divergences: list[GreedyDivergence | None] = []
        self.failures: list[Failure] = []
        self.prefill_fault = ""
        self.paired = {"greedy": Paired(), "sampled": Paired()}
        self._greedy_noise = 0.0
        self._silent = 0

    def add(
        self,
        answers: Answers,
        samples: Sequence[ComparedSample],
        flips: Sequence[GreedyDivergence | None],
    ) -> None:
        """Add the results of one part."""
        self.engine = answers.engine
        self.failures += answers.failures
        self.prefill_fault = self.prefill_fault or answers.prefill_fault
        self.divergences += flips
        self._take_faults(answers)
        for sample in samples:
            self._take(sample)

    def noise(self, otherwise: float) -> float:
        """The largest |dlogp| on greedy tokens, which are raw."""
        return self._greedy_noise or otherwise

    def findings(self) -> list[Finding]:
        """Findings on everything that could not be compared."""
        return [*self.bad.findings(), *self._gaps()]

    def _take(self, sample: ComparedSample) -> None:
        own, completion = sample.score.logprobs, sample.completion
        self._silent += int((~np.isfinite(own)).sum())
        aligned = align([own], [completion.logprobs])
        self.samples += 1
        self.sums.add(aligned)
        self.shown.add(sample, _largest(aligned))
        if sample.greedy and sample.greedy_score:
            pair = align([sample.greedy_score.raw], [sample.greedy.logprobs])
            self._greedy_noise = max(self._greedy_noise, _largest(pair))

    def _take_faults(self, answers: Answers) -> None:
        for completion in answers.sampled:
            self.bad.add(completion.prompt.index, completion.bad, "sampled")
        for completion in answers.greedy:
            self.bad.add(completion.prompt.index, completion.bad, "greedy")
        for sample, (_, bad) in answers.prefill.items():
            self.bad.add(sample, bad, "prefill")

    def _gaps(self) -> list[Finding]:
        found = []
        if self._silent:
            found.append(
                Finding(
                    check="reference_logprobs",
                    status="fail",
                    scope="sample",
                    subject="tokens",
                    measured=f"{self._silent} tokens that the reference scores as NaN or infinite",
                    expected="none",
                    blame="environment",
                    remedy="weights that hold NaN or overflow in this dtype: --dtype float32",
                )
            )
        if self.failures:
            first = self.failures[0]
            found.append(
                Finding(
                    check="requests",
                    status="warn",
                    scope="sample",
                    subject=f"sample {first.index}",
                    measured=f"{len(self.failures)} requests failed: {first.reason}",
                    expected="none",
                    blame="environment",
                )
            )
        if self.prefill_fault:
            found.append(Finding(check="prefill", status="skip", measured=self.prefill_fault))
        return found


def _largest(aligned: Aligned) -> float:
    return float(np.abs(aligned.r).max()) if len(aligned.t) else 0.0
