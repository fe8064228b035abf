"""Correctness reports from users of such trainers that a CPU can reproduce, and the test that keeps each one out.

A report is an issue or pull request of the project named first. Where several tests guard one report, the closest is
named; those of this file were written for their report.

    trl 4159          engine's log-probs before temperature    tests/trainer/test_regressions.py::test_any_sampling_starts_on_policy
    trl 6789          engine renormalises over top-p           tests/trainer/test_regressions.py::test_any_sampling_starts_on_policy
    trl 5312          rollouts from stale weights              tests/trainer/test_regressions.py::test_stale_weights_end_the_run
    nemo-rl 3297      log-prob of another token                tests/rollout/test_native.py::test_tokens_and_log_probs_equal_a_full_forward_for_every_token
    nemo-rl 316, 935  trainer forgets the temperature          tests/engine/test_scoring.py::test_entropy_only_when_asked_and_temperature_counts
    trl 2995, 3021    loss depends on accumulation             tests/engine/test_invariance.py::test_the_split_changes_nothing
    trl 6369          mask shrinks numerator only              tests/trainer/test_correction.py::test_denominators_follow_the_mask
    ms-swift 10117    divided by accumulation twice            tests/engine/test_parity.py::test_micro_batches_change_nothing
    prime-rl 2562     token counts of one rank                 tests/engine/test_invariance.py::test_local_denominators_are_found
    skyrl 925, 1296   mean of means over micro-batches         tests/engine/test_losses.py::test_a_cut_into_ranks_with_local_denominators_is_told_apart
    slime 919         where is the division by the mask        tests/algorithms/test_aggregate.py::test_weighted_sum_matches_the_oracle
    skyrl 873         schedule steps with mini-batches         tests/engine/test_optim.py::test_the_engine_counts_iterations_not_optimizer_steps
    roll 407          horizon in another unit                  tests/trainer/test_regressions.py::test_the_rate_falls_over_the_steps_of_the_run
    slime 1761        schedule advanced twice at resume        tests/engine/test_optim.py::test_an_engine_set_to_an_iteration_goes_on_with_the_same_rates
    verl 3674         first update at rate zero                tests/engine/test_optim.py::test_never_zero_at_first_and_always_within_bounds
    nemo-rl 1518      leave-one-out deviation of zero          tests/algorithms/test_groups.py::test_equal_scores_give_exact_zeros
    nemo-rl 4158      variance by cancellation                 tests/algorithms/test_groups.py::test_nearly_equal_scores_stay_bounded
    nemo-rl 4061      masked samples vote in their group       tests/algorithms/test_estimators.py::test_a_rejected_sample_moves_nobody_and_gets_nothing
    miles 1827        reward on a tool token is lost           tests/algorithms/test_advantages.py::test_a_reward_on_a_tool_token_belongs_to_the_last_token_of_the_policy_before_it
    trl 7039          one of several end tokens                tests/rollout/test_native.py::test_a_response_ends_with_any_of_the_end_tokens_or_at_the_cap
    skyrl 1633        NaN under the mask                       tests/algorithms/test_masked.py::test_values_and_gradients_outside_the_mask_never_leak
    openrlhf 1240     NaN under the mask, in the KL            tests/algorithms/test_kl.py::test_matches_the_oracle_whatever_lies_outside_the_mask
    trl 2496          sentinel log-probs in a mean             tests/trainer/test_regressions.py::test_metrics_are_means_over_the_policys_tokens
    trl 4967, 6503    k3 as a loss is biased                   tests/trainer/test_regressions.py::test_only_the_plus_forms_have_the_gradient_of_the_kl_in_expectation
    trl 5224          trained ids are not the sampled ones     tests/trainer/test_regressions.py::test_token_ids_travel_end_to_end
    skyrl 123         text round trip                          tests/trainer/test_regressions.py::test_token_ids_travel_end_to_end
    slime 2263        template rendered per message            tests/data/test_prompts.py::test_rows_of_every_format_become_the_tokens_of_the_rendered_template
    torchtitan 3751   save exists and is never called          tests/trainer/test_regressions.py::test_saving_is_called_when_due_and_at_the_end
    verl 7462         critic's batch keys do nothing           tests/trainer/test_edges.py::test_samples_over_the_token_budget
    verl 6957         critic's gradient follows micro-batches  tests/engine/test_invariance.py::test_the_split_changes_nothing
    verl 7913, 5614   geo_mean bypasses the reducer            tests/engine/test_losses_policies.py::test_any_cut_of_the_tokens_changes_nothing
    verl 7829         kl_cov picks per micro-batch             tests/algorithms/test_policy_losses.py::test_parts_would_pick_other_tokens_than_the_whole
    verl 5798, 5366   sequence means off by ranks squared      tests/engine/test_invariance.py::test_the_split_changes_nothing
    verl 6176         micro-batch counts differ, hang          tests/engine/test_packing.py::test_split_keeps_its_promises
    verl 7817, 7823   clip ratio from a tensor's width         tests/trainer/test_regressions.py::test_the_clip_ratio_counts_finish_reasons
    verl 6452, 6362   rejected samples move the baseline       tests/trainer/test_correction.py::test_a_rejected_sample_neither_votes_nor_gets_an_advantage
    verl 6485         a rejected micro-batch raises            tests/trainer/test_correction.py::test_a_batch_that_is_rejected_as_a_whole
    verl 782          NaN when all is masked                   tests/algorithms/test_masked.py::test_no_valid_token_and_one_valid_token_are_defined
    verl 891, 747     overflow in the backward of k3           tests/algorithms/test_kl.py::test_huge_log_ratios_have_finite_values_and_gradients_in_float32
    verl 2626, 1197   NaN weights reach the engine             tests/trainer/test_edges.py::test_non_finite_gradients_are_skipped_counted_and_end_the_run
    verl 6280, 2305   ratio is not 1 on-policy                 tests/trainer/test_edges.py::test_the_first_mini_batch_is_on_policy
    verl 2088         ratio is not 1 on-policy                 tests/trainer/test_edges.py::test_the_first_mini_batch_is_on_policy
    verl 7274         correct answers scored 0                 tests/rewards/test_gsm8k.py::test_strict
    verl 7789         no flexible mode                         tests/rewards/test_gsm8k.py::test_flexible
    verl 2265         world size in file names                 tests/engine/test_export.py::test_a_saved_folder_is_the_trained_model
    verl 473, 606     batch has to divide by ranks             tests/engine/test_packing.py::test_padding_is_only_what_ranks_without_samples_need
    verl 7476, 3512   sequence parallel silently off           tests/engine/test_scoring.py::test_two_ranks_that_share_the_row
    verl 2639, 5957   wrong KL with sequence parallel          tests/engine/test_parity.py::test_four_ranks_train_like_one
    verl 1144, 964    a rank dies and the others wait          tests/workers/test_ray_launcher.py::test_one_rank_leaves_while_the_others_hang
    verl 3266, 2517   no CPU                                   tests/trainer/test_estimators.py::test_every_estimator_trains

Reported and listed as worth a test:

    verl 2337         values of tool tokens in GAE             tests/algorithms/test_advantages.py::test_tool_tokens_do_not_change_the_advantages_of_the_policys_tokens
    verl 50, roll 447 bootstrapping from masked values         tests/algorithms/test_advantages.py::test_values_of_tool_tokens_and_everything_of_padding_samples_are_never_read
    verl 3741, 4360   Dr. GRPO's normalisation                 tests/algorithms/test_groups.py::test_grpo_with_and_without_the_standard_deviation
    verl 2776         meaning of token-mean                    tests/algorithms/test_aggregate.py::test_a_fully_masked_sample_still_counts_as_a_sample
    verl 6239         overlong filter measures wrongly         tests/data/test_prompts.py::test_filtering_drops_overlong_rows_counts_them_and_keeps_row_numbers
    verl 7581         rloo of a single sample                  tests/algorithms/test_groups.py::test_the_only_sample_left_of_its_group
    trinity-rft 398   over the token budget: assertion         tests/engine/test_packing.py::test_a_sample_longer_than_the_budget_is_alone_and_reported
    transformers 46634 packed rows see each other              tests/engine/test_scoring.py::test_no_sample_sees_another
    trl 5854          a row's end predicts the next sample     tests/engine/test_packed.py::test_each_prediction_sits_before_its_token
    vime 64           log-probs after top-p                    tests/rollout/test_sampling.py::test_log_probs_are_of_the_whole_vocabulary_at_the_sampling_temperature
    search-r1 21      tool tokens in the KL                    tests/algorithms/test_kl.py::test_kl_in_reward_takes_the_penalty_off_valid_tokens_only
    maxtext 3629      a reward that hangs                      tests/rewards/test_pool.py::test_a_function_that_hangs_is_ended_and_named
"""  # noqa: E501

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from corral.algorithms.kl import kl
from corral.batch import Batch
from corral.engine.rank import Rank
from corral.errors import TrainingError
from corral.rollout.native import NativeEngine
from corral.trainer.generation import push_weights
from corral.trainer.metrics import data_metrics, mean_of_tokens, rollout_metrics
from corral.workers.worker import Worker
from tests.plans import tiny_plan
from tests.trainer.runs import Inputs, metrics, samples, train_here

ROOT = Path(__file__).parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GUARDS = re.findall(r"^    (\S.*?)\s{2,}.*?(tests/\S+\.py)::(\w+)$", __doc__ or "", flags=re.MULTILINE)


def test_every_report_has_its_test():
    listed = [line for line in (__doc__ or "").splitlines() if line.startswith("    ")]
    assert len(GUARDS) == len(listed) > 50
    for report, file, name in GUARDS:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, report


# Engine and trainer --------------------------------------------------------------------------------------------------


def test_any_sampling_starts_on_policy(inputs: Inputs, tmp_path: Path):
    more = [f"{ROLLOUT}.temperature=0.6", f"{ROLLOUT}.top_p=0.8", f"{ROLLOUT}.top_k=20"]
    overrides = inputs.overrides(tmp_path, "reward.num_workers=1", f"{ACTOR}.ppo_mini_batch_size=8", *more)
    assert train_here(overrides) == 0
    (out,) = metrics(tmp_path)
    assert out["training/rollout_probs_diff_max"] <= 1e-4
    assert abs(out["rollout_corr/kl"]) <= 1e-4
    assert abs(out["actor/ppo_kl"]) <= 1e-5
    assert out["actor/pg_clipfrac"] == 0


def test_stale_weights_end_the_run(inputs: Inputs):
    """An engine that lost its weights, or never got the new ones, goes on to answer plausibly; the probe does not."""
    plan = tiny_plan(path=str(inputs.model))
    worker = Worker(Rank(), plan, horizon=1)
    worker.start_rollout([0])
    module = worker.engines["actor"].module
    worker.rollout = NativeEngine(copy.deepcopy(module), eos_token_ids=[0], plan=plan.rollout, max_length=96)
    probe = Batch.from_samples([[5, 6, 7]], [[8, 9, 10]], row=[0], sample_index=[0], group=[0], finish=["stop"])
    assert push_weights(worker, plan, probe) < 1e-4
    with torch.no_grad():
        module.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(TrainingError, match="does not run the trainer's weights"):
        push_weights(worker, plan, probe)
    worker.rollout.update_weights(module.named_parameters())
    assert push_weights(worker, plan, probe) < 1e-4


def test_token_ids_travel_end_to_end(inputs: Inputs, tmp_path: Path):
    """What is trained on is what was sampled, also where decoding and encoding again gives other tokens."""
    assert train_here(inputs.overrides(tmp_path, "reward.num_workers=1")) == 0
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    found = samples(tmp_path, 1)
    again = [tokenizer.encode(sample["output"], add_special_tokens=False) for sample in found]
    assert any(ids != sample["response_ids"] for ids, sample in zip(again, found, strict=True))
    # The engine's log-probs of its tokens are the trainer's of the tokens it trains on.
    assert metrics(tmp_path)[0]["training/rollout_probs_diff_max"] <= 1e-4


# Schedules and saving ------------------------------------------------------------------------------------------------


def test_the_rate_falls_over_the_steps_of_the_run(inputs: Inputs, tmp_path: Path):
    """The horizon is the number of steps, however many samples, mini-batches and epochs a step has."""
    more = [
        f"{ROLLOUT}.n=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.optim.lr_scheduler_type=linear",
        f"{ACTOR}.optim.lr_warmup_steps=1",
        "critic.optim.lr_scheduler_type=cosine",
        "data.max_response_length=8",
        "trainer.total_training_steps=4",
        "reward.num_workers=1",
    ]
    assert train_here(inputs.overrides(tmp_path, *more)) == 0
    assert [out["actor/lr"] for out in metrics(tmp_path)] == pytest.approx([1e-3, 1e-3, 2e-3 / 3, 1e-3 / 3])
    assert all(out["critic/lr"] > 0 for out in metrics(tmp_path))


def test_saving_is_called_when_due_and_at_the_end(inputs: Inputs, tmp_path: Path):
    more = ["data.max_response_length=4", "trainer.total_training_steps=3", "trainer.save_freq=2"]
    assert train_here(inputs.overrides(tmp_path, "reward.num_workers=1", *more)) == 0
    assert sorted(folder.name for folder in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]


# Metrics -------------------------------------------------------------------------------------------------------------


def responses(lengths: list[int], finish: list[str]) -> Batch:
    count = range(len(lengths))
    batch = Batch.from_samples(
        [[7]] * len(lengths),
        [[1] * length for length in lengths],
        row=count,
        sample_index=[0] * len(lengths),
        group=count,
        finish=finish,
        rollout_log_probs=[[-1.0] * length for length in lengths],
    )
    zeros = torch.zeros(sum(lengths))
    return batch.with_fields(rewards=zeros, advantages=zeros, returns=zeros)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [(["stop", "stop", "stop", "stop"], 0.0), (["length", "stop", "stop", "stop"], 0.25), (["length"] * 4, 1.0)],
)
def test_the_clip_ratio_counts_finish_reasons(finish: list[str], expected: float):
    """Not the longest of the batch, nor the cap: 3 tokens may be cut (by the model's positions), 5 may just end."""
    batch = responses([3, 5, 5, 2], finish)
    assert data_metrics(batch, torch.zeros(4), 512)["response_length/clip_ratio"] == expected


def test_metrics_are_means_over_the_policys_tokens():
    """Whatever stands at other tokens; and over tokens, not over the means of samples of different lengths."""
    batch = responses([1, 4], ["stop", "stop"]).with_fields(
        response_mask=torch.tensor([True, True, True, False, True]), rewards=torch.zeros(5)
    )
    entropy = torch.tensor([8.0, 1.0, 1.0, float("nan"), 2.0])
    assert mean_of_tokens(batch, entropy) == 3.0
    sentinel = torch.tensor([-1.0, -1.0, -1.0, 1.0, -1.0])
    assert rollout_metrics(batch, sentinel)["training/rollout_probs_diff_max"] == pytest.approx(0, abs=1e-7)
    advantages = torch.tensor([4.0, 1.0, 1.0, 1e9, 2.0])
    out = data_metrics(batch.with_fields(advantages=advantages), torch.zeros(2), 512)
    assert (out["critic/advantages/mean"], out["critic/advantages/max"]) == (2.0, 4.0)


# Gradients -----------------------------------------------------------------------------------------------------------


def test_only_the_plus_forms_have_the_gradient_of_the_kl_in_expectation():
    """Over all tokens of a small vocabulary, each with its own probability: no sampling error."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    reference = other.log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)

    def expected(kind: str) -> torch.Tensor:
        log_probs = logits.log_softmax(0)
        terms = kl(log_probs, reference, torch.ones(6, dtype=torch.bool), kind)
        return torch.autograd.grad((log_probs.detach().exp() * terms).sum(), logits)[0]

    for kind in ("k2", "k1+", "abs+", "k2+", "k3+"):
        torch.testing.assert_close(expected(kind), exact, rtol=1e-12, atol=1e-12)
    assert expected("k1").abs().max() < 1e-12  # a score function: zero in expectation
    assert (expected("k3") - exact).abs().max() > 0.01
