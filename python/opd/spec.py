# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Speculative rollout: verification without loss, trees of drafts, drafters that need no model, tuners.

    drafts = spec.Drafts(tokens)                                       # a chain; parents=: a tree; offsets=: a batch
    v = spec.verify(drafts, p, q, drawn="dense", seed=1, sample=3, position=len(prefix))
    text += v.written.tolist()                                         # what was followed, then the token after it

    v = spec.follow(drafts, own)                                       # the target's own tokens decide

    table = spec.NgramTable()                                          # a drafter
    table.learn(text)
    drafts = spec.Drafts(table.draft(text, most=8).tokens)

    tuner = spec.beg_mab()
    strategy = tuner.choose(batch, uniforms := spec.Uniforms(seed, step))
    tuner.heard(strategy, batch, accepted, seconds, uniforms)

docs/spec has what the rules are and why they are exact. Whatever has a handle is freed with its last reference, by
close(), or at the end of a `with`; used after that it raises InvalidInput. Calls that share a handle wait for each
other. InvalidInput has changed nothing.
"""

from __future__ import annotations

from ._spec_drafters import (
    Drafted,
    Match,
    NgramTable,
    PromptGroups,
    SuffixAutomaton,
    TextId,
)
from ._spec_trees import (
    GREEDY,
    DraftLaw,
    DraftTree,
    FollowRates,
    Node,
    Selected,
    Shares,
    draft_budget,
    step_seconds,
)
from ._spec_tuners import (
    REWARDS,
    DrafterSelector,
    ElasticSwitch,
    Prediction,
    StepObservation,
    Strategy,
    Tuner,
    Uniforms,
    beg_mab,
    cost_profile,
    fixed_table,
    merged,
    published_beg_mab,
    ucb1,
)
from ._spec_verify import (
    PROPOSALS,
    Coins,
    Drafts,
    Verdict,
    Verdicts,
    follow,
    verify,
)

__all__ = [
    "Coins",
    "DraftLaw",
    "DraftTree",
    "Drafted",
    "DrafterSelector",
    "Drafts",
    "ElasticSwitch",
    "FollowRates",
    "GREEDY",
    "Match",
    "NgramTable",
    "Node",
    "PROPOSALS",
    "Prediction",
    "PromptGroups",
    "REWARDS",
    "Selected",
    "Shares",
    "StepObservation",
    "Strategy",
    "SuffixAutomaton",
    "TextId",
    "Tuner",
    "Uniforms",
    "Verdict",
    "Verdicts",
    "beg_mab",
    "cost_profile",
    "draft_budget",
    "fixed_table",
    "follow",
    "merged",
    "names",
    "published_beg_mab",
    "step_seconds",
    "ucb1",
    "verify",
]


def names(table: str) -> dict[str, str]:
    """The names of "proposal" and "tuner", and what each is."""
    from .estimators import names as of_table

    return of_table(table)
