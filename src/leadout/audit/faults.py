"""The faults that `leadout audit --inject` puts into an engine, and four harmless changes that must not fail.

Each acts through the objects the engine is built from; the engine itself has no switches. A fault is a no-op under
most settings, so each names the setting under which it acts; the drafter must sample with its q (`noisy_policy`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from leadout.audit import fault_rules as rules
from leadout.audit.fault_drafters import (
    AsPointMass,
    ConfidentOnly,
    GreedyWithSoftQ,
    LateStop,
    OneNoisePerPrompt,
    RandomQ,
    UnmappedQ,
    WrongMap,
)
from leadout.audit.fault_parts import (
    ForgetfulPenalties,
    LateFilters,
    SamplerAround,
    ShiftedKV,
    StaleKV,
    UntemperedLogprobs,
)
from leadout.drafters.noisy_policy import NoisyPolicyDrafter
from leadout.errors import ConfigError
from leadout.interfaces import Drafter, Generator
from leadout.records import SamplingParams
from leadout.rollout.accept import AcceptRule
from leadout.rollout.parts import EngineParts

Install = Callable[[EngineParts, SamplingParams], EngineParts]
Wrap = Callable[[Generator], Generator]
_PLAIN = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, or one harmless change."""

    name: str
    """As given to `--inject`."""
    summary: str
    """What goes wrong, in one line."""
    setting: SamplingParams = _PLAIN
    """Sampling under which it acts."""
    drafter: str = "noisy_policy"
    """Drafter under which it acts."""
    harmless: bool = False
    """Whether the audit must pass."""
    install: Install = lambda parts, params: parts
    """Returns the parts with the fault in them."""
    wrap: Wrap = lambda generator: generator
    """Faults of what the generator as a whole returns."""

    def check(self, params: SamplingParams) -> None:
        """Raises ConfigError for sampling under which the fault would change nothing."""
        idle = [n for n in self._settings() if getattr(params, n) == getattr(_PLAIN, n)]
        if idle:
            named = ", ".join(f"--{n.replace('_', '-')} {getattr(self.setting, n)}" for n in idle)
            raise ConfigError(
                f"fault {self.name} acts only with {named} or the like; leave the option out, or change it"
            )

    def _settings(self) -> list[str]:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return [name for name in names if getattr(self.setting, name) != getattr(_PLAIN, name)]

    @property
    def line(self) -> str:
        """One line for `--list-faults`."""
        changed = [f"{name}={getattr(self.setting, name)}" for name in self._settings()]
        note = "  (harmless: must pass)" if self.harmless else ""
        return f"{self.name}: {self.summary} [{', '.join(changed) or 'temperature=1.0'}; {self.drafter}]{note}"


def _rule(rule: AcceptRule) -> Install:
    def install(parts: EngineParts, params: SamplingParams) -> EngineParts:
        _sampling_drafter(parts)
        return replace(parts, rule=rule)

    return install


def _sampling_drafter(parts: EngineParts) -> Drafter:
    """The drafter. Raises ConfigError where none samples: the fault would be a no-op."""
    if parts.drafter is None or parts.drafter.point_mass:
        raise ConfigError("expected a drafter that samples for this fault, got none; use --method noisy_policy")
    return parts.drafter


def _sampler(around: type[SamplerAround]) -> Install:
    def install(parts: EngineParts, params: SamplingParams) -> EngineParts:
        inner = parts.sampler
        return replace(parts, sampler=lambda slots, vocab_size, device: around(inner(slots, vocab_size, device)))

    return install


def _drafter(around: Callable[[Drafter], Drafter]) -> Install:
    def install(parts: EngineParts, params: SamplingParams) -> EngineParts:
        return replace(parts, drafter=around(_sampling_drafter(parts)))

    return install


def _stale_kv(parts: EngineParts, params: SamplingParams) -> EngineParts:
    return replace(parts, kv=StaleKV(parts.kv))


def _shifted_kv(parts: EngineParts, params: SamplingParams) -> EngineParts:
    return replace(parts, kv=ShiftedKV(parts.kv))


def _stale_draft_kv(parts: EngineParts, params: SamplingParams) -> EngineParts:
    drafter = parts.drafter
    if not isinstance(drafter, NoisyPolicyDrafter):
        raise ConfigError("expected the noisy_policy drafter for this change, got another; use --method noisy_policy")
    drafter.kv = StaleKV(drafter.kv)
    return parts


def _cold_accept(parts: EngineParts, params: SamplingParams) -> EngineParts:
    _sampling_drafter(parts)
    warm = rules.Untempered(params.temperature)
    return replace(parts, rule=rules.ChangedRule(correction_law=warm, bonus_law=warm))


def _late_top_p(parts: EngineParts, params: SamplingParams) -> EngineParts:
    _sampling_drafter(parts)
    filtered = rules.Filtered(params)
    rule = rules.ChangedRule(correction_law=filtered, bonus_law=filtered)
    return _sampler(LateFilters)(replace(parts, rule=rule), params)


def _bonus_min_p(parts: EngineParts, params: SamplingParams) -> EngineParts:
    _sampling_drafter(parts)
    rule = rules.ChangedRule(bonus_law=rules.Filtered(params))
    return _sampler(LateFilters)(replace(parts, rule=rule), params)


_ALL = (
    Fault(
        name="shared-uniform",
        summary="the number that decides acceptance draws the correction too",
        install=_rule(rules.shared_accept_rule()),
    ),
    Fault(
        name="draft-noise-reused",
        summary="the number that drew the draft draws the correction too",
        install=_rule(rules.shared_draft_rule()),
    ),
    Fault(
        name="point-accept-soft-residual",
        summary="accept with p(d), correct from (p - q)+",
        install=_rule(rules.ChangedRule(accept=rules.point_acceptance)),
    ),
    Fault(
        name="soft-accept-point-residual",
        summary="accept with min(1, p/q), correct from p without d",
        install=_rule(rules.ChangedRule(correction=rules.without_draft)),
    ),
    Fault(
        name="greedy-draft-soft-q",
        summary="the draft is q's argmax, verified as if sampled from q",
        install=_drafter(GreedyWithSoftQ),
    ),
    Fault(
        name="one-token-residual",
        summary="the residual subtracts q at the drafted token only",
        install=_rule(rules.ChangedRule(correction=rules.one_token_residual)),
    ),
    Fault(
        name="policy-residual",
        summary="corrections are drawn from p itself",
        install=_rule(rules.ChangedRule(correction=rules.policy_residual)),
    ),
    Fault(
        name="temperature-in-accept-only",
        summary="corrections and bonus tokens ignore the temperature",
        setting=SamplingParams(temperature=0.7),
        install=_cold_accept,
    ),
    Fault(
        name="top-p-after-acceptance",
        summary="drafts are accepted against the unfiltered law",
        setting=SamplingParams(temperature=0.7, top_p=0.9),
        install=_late_top_p,
    ),
    Fault(
        name="min-p-on-bonus-only",
        summary="min-p reaches bonus tokens and plain steps only",
        setting=SamplingParams(min_p=0.05),
        install=_bonus_min_p,
    ),
    Fault(
        name="penalty-ignores-drafts",
        summary="later positions of a round are not penalised for its drafts",
        setting=SamplingParams(repetition_penalty=1.5),
        install=_sampler(ForgetfulPenalties),
    ),
    Fault(
        name="stale-cache",
        summary="a rejected draft stays in the policy's cache",
        install=_stale_kv,
    ),
    Fault(
        name="position-off-by-one",
        summary="the policy's positions move by one after a rejection",
        install=_shifted_kv,
    ),
    Fault(
        name="unmapped-q",
        summary="the vocabulary map reaches the drafted ids but not q",
        install=_drafter(UnmappedQ),
    ),
    Fault(
        name="mixed-rows",
        summary="rows that accepted different counts swap their corrections",
        install=_rule(rules.mixed_rows),
    ),
    Fault(
        name="bonus-wrong-position",
        summary="the bonus is drawn from the position before",
        install=_rule(rules.ChangedRule(bonus_shift=-1)),
    ),
    Fault(
        name="logprobs-before-temperature",
        summary="returned log-probabilities ignore the temperature",
        setting=SamplingParams(temperature=0.7),
        install=_sampler(UntemperedLogprobs),
    ),
    Fault(
        name="own-confidence",
        summary="a sampled draft with a low probability of its own is dropped",
        install=_drafter(ConfidentOnly),
    ),
    Fault(name="sibling-noise", summary="siblings share their random numbers", wrap=OneNoisePerPrompt),
    Fault(name="late-stop", summary="tokens after the end of sequence are kept", wrap=LateStop),
    Fault(
        name="sampled-as-point-mass",
        summary="a sampled draft verified as if certain: exact, but accepted less often",
        harmless=True,
        install=_drafter(AsPointMass),
    ),
    Fault(
        name="wrong-map-both-sides",
        summary="wrong vocabulary map in the ids and in q alike",
        harmless=True,
        install=_drafter(WrongMap),
    ),
    Fault(
        name="stale-draft-cache",
        summary="a rejected draft stays in the drafter's cache",
        harmless=True,
        install=_stale_draft_kv,
    ),
    Fault(
        name="random-drafter",
        summary="drafts know nothing of the policy",
        harmless=True,
        install=_drafter(RandomQ),
    ),
)


def faults() -> tuple[Fault, ...]:
    """Every fault, the harmless ones last."""
    return _ALL


def fault_named(name: str) -> Fault:
    """The fault of that name. Raises ConfigError for an unknown one."""
    for fault in _ALL:
        if fault.name == name:
            return fault
    raise ConfigError(
        f"expected one of the faults of --list-faults, got {name!r}; known: {', '.join(f.name for f in _ALL)}"
    )
