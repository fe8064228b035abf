"""The Plan: what a run will do, derived once from the configuration and the topology.

Everything downstream of the configuration reads the Plan and nothing else, so a number that is printed before the run
is the number the run uses. Units: prompts and samples as named, token budgets in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from corral.config.reads import Recorded


@dataclass(frozen=True)
class Topology(Recorded):
    """Where the run happens. `launcher` is "in_process" (world 1, no Ray) or "ray"."""

    device: str  # cpu | cuda | npu
    nnodes: int
    devices_per_node: int
    launcher: str
    ray_address: str | None  # joined when set; None with launcher "ray" means: start local nodes on this machine

    @property
    def world(self) -> int:
        return self.nnodes * self.devices_per_node


@dataclass(frozen=True)
class MicroBatches(Recorded):
    """How the samples of one rank are cut into forward passes. Exactly one of the two limits applies."""

    token_budget: int | None  # dynamic: tokens of one packed row before the sequence-parallel split
    samples: int | None  # static: samples in one packed row


@dataclass(frozen=True)
class Optimizer(Recorded):
    """AdamW and its schedule. Steps are iterations of the trainer; the horizon is known once the data is."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    clip_grad: float
    lr_scheduler_type: str  # constant | linear | cosine
    lr_warmup_steps: int  # -1: use the ratio
    lr_warmup_steps_ratio: float
    min_lr_ratio: float
    num_cycles: float


@dataclass(frozen=True)
class Model(Recorded):
    """A transformers model folder and how to load it."""

    path: str
    tokenizer_path: str
    trust_remote_code: bool
    override_config: dict[str, Any]
    gradient_checkpointing: bool
    fused_modules: bool = False  # norms, SwiGLU and rotary embedding by the device's own fused kernels


@dataclass(frozen=True)
class EnginePlan(Recorded):
    """One model that trains or scores: actor, critic or reference."""

    role: str  # actor | critic | ref
    model: Model
    sp: int
    dp: int
    master_dtype: str  # float32 | float64 | bfloat16: parameters and optimizer state
    compute_dtype: str  # forward and backward
    param_offload: bool
    optimizer_offload: bool
    reshard_after_forward: bool
    use_torch_compile: bool
    seed: int  # of newly initialised weights (the value head)
    infer: MicroBatches
    train: MicroBatches | None = None  # None: never trained
    optim: Optimizer | None = None
    attention: str = "auto"  # the kernel of the device; for cuda also flash_attention_2 (flash-attn) | sdpa


@dataclass(frozen=True)
class PolicyLossOptions(Recorded):
    """Settings of single policy losses; each loss's docstring says which it reads."""

    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05
    clip_cov_ratio: float = 2e-4  # clip_cov: share of tokens whose gradient is dropped
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4  # kl_cov: share of tokens that get the penalty
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None


@dataclass(frozen=True)
class ActorUpdate(Recorded):
    """The policy objective and how an iteration is cut into optimizer steps."""

    mini_batch_prompts: int
    epochs: int
    shuffle: bool
    shuffle_seed: int
    loss_mode: str
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: float | None  # tokens; set whenever loss_agg_mode divides by it
    entropy_coeff: float
    calculate_entropy: bool
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    optimizer_steps: int  # per iteration
    options: PolicyLossOptions = PolicyLossOptions()
    selection_seed: int = 42  # of losses that pick tokens at random


@dataclass(frozen=True)
class CriticUpdate(Recorded):
    """The value objective and how an iteration is cut into optimizer steps."""

    mini_batch_prompts: int
    epochs: int
    shuffle: bool
    shuffle_seed: int
    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: float | None  # tokens; set whenever loss_agg_mode divides by it
    optimizer_steps: int


@dataclass(frozen=True)
class Sampling(Recorded):
    """How the next token is drawn. top_k -1: all tokens. temperature 0 or do_sample False: greedy."""

    temperature: float
    top_k: int
    top_p: float
    do_sample: bool
    n: int  # samples per prompt

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class VllmPlan(Recorded):
    """Options of the vllm engine under its own names, except those that follow from the run.

    sleeps: it gives its memory back while the run trains. engine_kwargs: handed to vllm as they are.
    """

    dtype: str  # bfloat16 | float32
    gpu_memory_utilization: float  # of the whole device
    cache_bytes: int | None  # keys and values of a rank; None: what gpu_memory_utilization leaves
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    sleeps: bool
    max_num_batched_tokens: int
    max_model_len: int  # tokens
    load_format: str
    engine_kwargs: dict[str, Any]


@dataclass(frozen=True)
class RolloutPlan(Recorded):
    """The engine that generates, and how many copies of it."""

    name: str  # what runs: native | vllm
    requested: str  # what the configuration asked for
    replicas: int
    tensor_model_parallel_size: int
    prompt_length: int
    response_length: int
    max_num_seqs: int  # sequences decoded together by one replica
    ignore_eos: bool
    seed: int
    sampling: Sampling
    val_sampling: Sampling
    probe_tolerance: float  # largest log-prob gap between trainer and engine after a weight update
    graphs: bool = False  # the native engine's decode step is captured as device graphs
    vllm: VllmPlan | None = None  # set when it is the engine
    environment: dict[str, str] = field(default_factory=dict)  # of every rank, for the engine; what is set stays


@dataclass(frozen=True)
class SkipPlan(Recorded):
    """Record and replay of generations (skip.rollout). `dump_dir` is the folder of this experiment and its lengths."""

    enable: bool
    dump_dir: str
    steps: tuple[int, ...]
    action: str  # cache | repeat


@dataclass(frozen=True)
class DataPlan(Recorded):
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]
    prompt_key: str
    train_batch_size: int  # prompts per iteration
    max_prompt_length: int
    max_response_length: int
    truncation: str  # error | left | right | middle
    filter_overlong_prompts: bool
    shuffle: bool
    seed: int
    train_max_samples: int  # -1: all
    val_max_samples: int
    apply_chat_template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class RewardPlan(Recorded):
    """Custom function by file path or module, else the scorer named by data_source."""

    custom_path: str | None
    custom_name: str
    reward_kwargs: dict[str, Any]
    num_workers: int
    timeout: float  # seconds for one sample


@dataclass(frozen=True)
class KLControl(Recorded):
    """Coefficient of the KL in reward. fixed: kl_coef; adaptive: follows target_kl (Ziegler et al., 2019)."""

    type: str  # fixed | adaptive
    kl_coef: float
    horizon: int  # samples
    target_kl: float


@dataclass(frozen=True)
class FilterGroups(Recorded):
    """Dynamic sampling (DAPO): groups whose metric does not vary are dropped and further prompts generated."""

    metric: str  # score | reward | a key of the scorer's extra values, such as acc
    max_num_gen_batches: int  # 0: no limit


@dataclass(frozen=True)
class PFPPO(Recorded):
    """Resampling of samples after advantages are known."""

    reweight_method: str  # pow | max_min | max_random
    weight_pow: float


@dataclass(frozen=True)
class Rejection(Recorded):
    """One criterion of rollout rejection, such as seq_mean_k1, and the band it has to lie in."""

    criterion: str  # {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}
    lower: float | None
    upper: float


@dataclass(frozen=True)
class RolloutCorrection(Recorded):
    """What is done about engine and trainer disagreeing on log-probs."""

    rollout_is: str | None  # token | sequence
    lower: float | None  # None: truncate above `upper`; else weights outside the band are zero
    upper: float
    batch_normalize: bool
    rejections: tuple[Rejection, ...]
    bypass_mode: bool  # old log-probs are the engine's; no pass recomputes them
    loss_type: str  # bypass_mode: ppo_clip | reinforce


@dataclass(frozen=True)
class AlgorithmPlan(Recorded):
    adv_estimator: str  # a name, or an import path of a user's function
    gamma: float
    lam: float
    use_kl_in_reward: bool
    kl_penalty: str
    kl_ctrl: KLControl
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: tuple[str, ...] = ()
    gdpo_reward_weights: tuple[float, ...] = ()
    filter_groups: FilterGroups | None = None
    pf_ppo: PFPPO | None = None
    rollout_correction: RolloutCorrection | None = None
    sum_pi_squared: bool = False  # the estimator reads Σ π² of the distribution each token was drawn from
    seed: int = 42  # of resampling


@dataclass(frozen=True)
class TrainerPlan(Recorded):
    project_name: str
    experiment_name: str
    run_dir: str  # records: plan, configuration, metrics, traces, logs
    checkpoint_dir: str  # checkpoints; the run folder unless CORRAL_RUN_DIR moves the records
    logger: tuple[str, ...]
    total_epochs: int
    total_training_steps: int | None  # None: steps per epoch × epochs, known once the data is read
    critic_warmup: int
    balance_batch: bool
    save_freq: int
    test_freq: int
    val_before_train: bool
    val_only: bool
    val_cost_rows: int  # a validation set above this many rows prints its estimated cost first (cpu)
    rollout_data_dir: str | None
    cluster_wait: float  # seconds to wait for the nodes and devices of a cluster that is joined
    full_determinism: bool = False  # deterministic kernels and collectives, in every rank
    collective_check: bool = True  # before the models load, in a world of more than one rank
    record_phases: str = "none"  # none | summary | full: what each step leaves in phases/
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")  # and hf_model
    resume_mode: str = "disable"  # disable | auto | resume_path
    resume_from_path: str | None = None  # of resume_path
    max_actor_ckpt_to_keep: int | None = None  # None: all
    max_critic_ckpt_to_keep: int | None = None


@dataclass(frozen=True)
class RoleMemory:
    """What one rank holds of one model (actor, critic, ref, or the rollout's copy): an estimate, in bytes."""

    role: str
    parameters: int  # of the whole model, a count
    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Unused:
    """A key that was set but has no effect here."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Plan(Recorded):
    """The whole run. Optimizer steps, budgets and degrees are final; nothing downstream recomputes them."""

    topology: Topology
    data: DataPlan
    actor: EnginePlan
    actor_update: ActorUpdate
    critic: EnginePlan | None
    critic_update: CriticUpdate | None
    ref: EnginePlan | None
    rollout: RolloutPlan
    skip: SkipPlan
    reward: RewardPlan
    algorithm: AlgorithmPlan
    trainer: TrainerPlan
    memory: tuple[RoleMemory, ...] = ()  # empty: the weights are not in safetensors files, so their size is not known
    notices: tuple[str, ...] = ()
    unused: tuple[Unused, ...] = field(default=())

    @property
    def samples_per_step(self) -> int:
        """Samples of one iteration: prompts × samples per prompt."""
        return self.data.train_batch_size * self.rollout.sampling.n

    @property
    def rank_memory(self) -> int:
        """Bytes of all models on one rank, device and host together; one model at a time has gradients."""
        held = sum(role.weights + role.optimizer for role in self.memory)
        return held + max((role.gradients for role in self.memory), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for plan.json, with the derived sizes spelled out."""
        out = asdict(self)
        out["topology"]["world"] = self.topology.world
        out["samples_per_step"] = self.samples_per_step
        out["rank_memory"] = self.rank_memory
        return out
