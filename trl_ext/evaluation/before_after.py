"""What training changed: the same held-out prompts before and after, from one trainer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.evaluation.generate_eval import Scored, check_reward_functions, compare_all, sample_completions, score
from trl_ext.evaluation.report import comparison_table, write_report

if TYPE_CHECKING:
    from rich.table import Table


class BeforeAfter:
    """Measures a rollout trainer's policy on held-out prompts; make it before `train()`, finish it after.

    A policy whose LoRA adapter is new is the untrained one whenever the adapter is off (LoRA starts as the identity),
    so both measurements can then be taken at the end and training starts at once: say so by `fresh_adapter`.

    Args:
        trainer: a GRPO or RLOO trainer; its sampling temperature and completion length are used.
        heldout: prompts not trained on, with the columns the reward functions need.
        ranges: lowest and highest value of each reward, for the overall score.
        samples: completions per prompt.
        fresh_adapter: the trainer made the adapter itself, from a `peft_config` with the usual initialisation. Not so
            for a policy that starts from a trained adapter: without it, that is not the policy before training.

    Raises:
        TypeError: a reward is a model or asynchronous; only functions can score here.
    """

    def __init__(
        self,
        trainer: Any,
        heldout: Any,
        ranges: dict[str, tuple[float, float]],
        samples: int = 4,
        fresh_adapter: bool = False,
    ) -> None:
        self.trainer, self.heldout, self.ranges, self.samples = trainer, heldout, ranges, samples
        check_reward_functions(trainer.reward_funcs)
        at_the_end = fresh_adapter and hasattr(trainer.model, "disable_adapter")
        self._before = None if at_the_end else self.measure()

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
            chat_template_kwargs=args.chat_template_kwargs,
        )
        return score(completions, self.heldout, self.trainer.reward_funcs, self.trainer.reward_func_names)

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
