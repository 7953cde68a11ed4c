"""Stage train, drafter: how many tokens a round would commit with a drafter, computed from rollouts of the policy.

Nothing is generated: along rollouts drawn from the policy, the chance that a draft had matched each token has a closed
form (`leadout.train.draft_loss.expected_rounds`). Used on each step's rollouts during a run, and on held-out ones when
a drafter is trained offline.

Axes: R response tokens of a pack, V draft vocabulary, N positions, B rollouts, L query columns, K drafts of a round, E
classes of entropy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from leadout.train.draft_loss import acceptance_of_token, expected_rounds, tempered
from leadout.train.drafted import Drafted, draft_along
from leadout.train.lesson import Lesson
from leadout.train.students import DraftStudent

ENTROPIES = (0.0, 0.3, 1.0, 2.0, 3.5)
"""Lower bounds, in nats, of the classes of policy entropy."""


class AcceptanceMeter:
    """Adds packs up; one per drafter and stage."""

    def __init__(
        self, student: DraftStudent, *, vocab_size: int, temperature: float, depth: int, budget: int, autocast: bool
    ) -> None:
        """`vocab_size`: the policy's; `depth`: drafts of a round; `budget`: response tokens beyond it are ignored."""
        self.student = student
        self._temperature = temperature
        self._depth = depth
        self._budget = budget
        self._autocast = autocast
        self._token_ids_V = student.token_ids_V
        self._draft_id_P: Tensor | None = None
        if self._token_ids_V is not None:
            self._draft_id_P = torch.full((vocab_size,), -1, device=self._token_ids_V.device)
            self._draft_id_P[self._token_ids_V] = torch.arange(
                self._token_ids_V.numel(), device=self._draft_id_P.device
            )
        self._tokens = 0
        self._rounds = 0.0
        self._shared_K = torch.zeros(depth, dtype=torch.float64)
        self._positions_K = torch.zeros(depth)
        self._coverage = 0.0
        self._by_entropy_E = torch.zeros(len(ENTROPIES), 2, dtype=torch.float64)

    @torch.no_grad()
    def add(self, lesson: Lesson, candidates: Iterable[int], drafted: Drafted | None = None) -> None:
        """Take a pack's rollouts at these places, as far as the budget goes.

        `drafted`: this drafter's run along the same rollouts, if there is one already.
        """
        rows: list[int] = []
        budget = self._budget - self._tokens
        rollouts = lesson.batch.rollouts
        for row in candidates:
            if budget <= 0:
                break
            if rollouts[row].length >= 2 and rollouts[row].loss_mask.all():
                rows.append(row)
                budget -= rollouts[row].length - 1
        if drafted is None or drafted.rows != tuple(rows) or len(drafted.logits) < self._depth:
            drafted = draft_along(self.student, lesson, rows, self._depth, autocast=self._autocast)
        if drafted is None:
            return
        accept_BLK = self._acceptances(lesson, drafted)
        lengths_B = np.array([rollouts[row].length for row in rows])
        self._tokens += int((lengths_B - 1).sum())
        self._rounds += float(expected_rounds(accept_BLK, lengths_B).sum())

    def metrics(self) -> dict[str, float]:
        """Expected acceptance length, and sum min(p, q) by position of the round; empty when nothing was measured.

        Also, of first positions: sum min(p, q) where the policy's entropy is at least E nats and below the next bound
        (`_entropy_E`), and the policy's probability of all tokens that can be drafted (`draft/vocabulary_coverage`).
        """
        if not self._rounds:
            return {}
        row = {"draft/expected_acceptance_length": self._tokens / self._rounds}
        for depth, rate in enumerate((self._shared_K / self._positions_K.clamp(min=1)).tolist(), 1):
            row[f"draft/expected_acceptance_rate_pos_{depth}"] = rate
        row["draft/vocabulary_coverage"] = self._coverage / float(self._positions_K[0])
        for bound, (shared, count) in zip(ENTROPIES, self._by_entropy_E.tolist(), strict=True):
            if count:
                row[f"draft/expected_acceptance_rate_entropy_{bound:g}"] = shared / count
        return row

    def _add_first(self, shared_N: Tensor, teacher_NV: Tensor, entropy_N: Tensor) -> None:
        """First positions of rounds: coverage, and acceptance by the policy's entropy."""
        self._coverage += float(teacher_NV.sum())
        bounds_E = torch.tensor(ENTROPIES[1:], dtype=entropy_N.dtype, device=entropy_N.device)
        class_N = torch.bucketize(entropy_N, bounds_E, right=True).cpu()
        added_N2 = torch.stack([shared_N, torch.ones_like(shared_N)], -1).double().cpu()
        self._by_entropy_E.index_add_(0, class_N, added_N2)

    def _acceptances(self, lesson: Lesson, drafted: Drafted) -> np.ndarray:
        """Acceptance by start and depth, [B, L + 1, K]; adds the sums of min(p, q) and their counts by depth."""
        depth, queries, teacher_NV = self._depth, drafted.queries, drafted.teacher_NV
        log_p_N = lesson.output.logprobs_R.detach()[queries.target_N]
        tokens_N = lesson.batch.token_ids_T[lesson.batch.response_R][queries.target_N]
        drafts_N = tokens_N if self._draft_id_P is None else self._draft_id_P[tokens_N]
        row_N, column_N = queries.row_N.cpu().numpy(), queries.column_N.cpu().numpy()
        accept_BLK = np.zeros((len(drafted.rows), drafted.columns + depth + 1, depth))
        for step, logits_NV in enumerate(drafted.logits[:depth], 1):
            own = queries.from_step(step)
            log_q_NV = tempered(logits_NV, self._temperature, teacher_NV.dtype).log_softmax(-1)
            draft_N = drafts_N[own]
            log_q_N = log_q_NV.gather(-1, draft_N.clamp(min=0)[:, None]).squeeze(-1)
            log_q_N = log_q_N.masked_fill(draft_N < 0, -torch.inf)
            accept_N = acceptance_of_token(log_p_N[own], log_q_N).double().cpu().numpy()
            # Column j of this step predicts token j + 1 for the round that starts at token j + 2 - step.
            accept_BLK[row_N[own], column_N[own] + 2 - step, step - 1] = accept_N
            q_NV = log_q_NV.exp_()
            shared_N = torch.minimum(teacher_NV[own], q_NV, out=q_NV).sum(-1)
            self._shared_K[step - 1] += float(shared_N.sum())
            if step == 1:
                self._add_first(shared_N, teacher_NV, lesson.output.entropy_R.detach()[queries.target_N])
            self._positions_K[step - 1] += draft_N.numel()
        return accept_BLK
