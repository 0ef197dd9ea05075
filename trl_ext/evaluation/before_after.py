"""What training changed: the same held-out prompts before and after, from one trainer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.evaluation.generate_eval import Scored, compare_all, sample_completions, score
from trl_ext.evaluation.report import comparison_table, write_report

if TYPE_CHECKING:
    from rich.table import Table


class BeforeAfter:
    """Measures a rollout trainer's policy on held-out prompts; make it before `train()`, finish it after.

    A policy with a LoRA adapter is the untrained one whenever the adapter is off (LoRA starts as the identity), so
    both measurements are then taken at the end and training starts at once.

    Args:
        trainer: a GRPO or RLOO trainer; its sampling temperature and completion length are used.
        heldout: prompts not trained on, with the columns the reward functions need.
        ranges: lowest and highest value of each reward, for the overall score.
        samples: completions per prompt.
    """

    def __init__(self, trainer: Any, heldout: Any, ranges: dict[str, tuple[float, float]], samples: int = 4) -> None:
        self.trainer, self.heldout, self.ranges, self.samples = trainer, heldout, ranges, samples
        self.has_adapter = hasattr(trainer.model, "disable_adapter")
        self._before = None if self.has_adapter else self.measure()

    def measure(self) -> Scored:
        """Sample and score the policy as it is now."""
        args = self.trainer.args
        completions = sample_completions(
            self.trainer.model,
            self.trainer.processing_class,
            self.heldout["prompt"],
            samples=self.samples,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            seed=args.seed,
        )
        return score(completions, self.heldout, self.trainer.reward_funcs)

    def finish(self, title: str) -> tuple["Table", Path]:
        """Measure again, write the report into the trainer's output folder; returns the table and the report's path."""
        after = self.measure()
        if self._before is None:
            with self.trainer.model.disable_adapter():
                self._before = self.measure()
        rows = compare_all(self._before, after, self.ranges)
        args = self.trainer.args
        report = write_report(Path(args.output_dir), title, rows, self._before, after, args.to_dict())
        return comparison_table(rows), report
