# What `import shardproof` gives; a test compares the names with __init__.py.
from . import check as check, fsdp as fsdp
from ._C import (
    BrokenInvariant as BrokenInvariant,
    Error as Error,
    FailedCheck as FailedCheck,
    NonFiniteError as NonFiniteError,
)
from .checkpoint import (
    Manager as Manager,
    load as load,
    load_weights as load_weights,
    save as save,
    save_weights as save_weights,
)
from .ema import Ema as Ema
from .experts import RouterBiases as RouterBiases, balance_loss as balance_loss, z_loss as z_loss
from .fingerprint import FingerprintCheck as FingerprintCheck
from .lora import Lora as Lora, add_lora as add_lora
from .optim import (
    LossScaler as LossScaler,
    Optimizer as Optimizer,
    adam as adam,
    adamw as adamw,
    lion as lion,
    muon as muon,
    sgd as sgd,
    torch_optimizer as torch_optimizer,
    warmup_constant as warmup_constant,
    warmup_cosine as warmup_cosine,
    warmup_inverse_sqrt as warmup_inverse_sqrt,
    warmup_linear as warmup_linear,
    warmup_stable_decay as warmup_stable_decay,
)
from .parallel import (
    ColumnInput as ColumnInput,
    ColumnParallel as ColumnParallel,
    CutDropout as CutDropout,
    ExpertParallel as ExpertParallel,
    PartialGradients as PartialGradients,
    RowParallel as RowParallel,
    ScatterOutput as ScatterOutput,
    WholeSequence as WholeSequence,
    SequenceParallel as SequenceParallel,
    TensorParallel as TensorParallel,
    VocabParallel as VocabParallel,
    fused_linear_cross_entropy as fused_linear_cross_entropy,
    parallelize as parallelize,
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from .check.runner import Report as Report
from .check.verify import ProofFailed as ProofFailed, verify as verify
from .ranks import Comm as Comm, MeshComm as MeshComm, comm_of as comm_of, run_mpi as run_mpi, run_threads as run_threads
from .ranks import seeded as seeded
from .sharded import Piece as Piece, Sharded as Sharded, UnitHandle as UnitHandle, sharded_of as sharded_of
from .sharding import fully_shard as fully_shard, transfer as transfer
from .units import Dropout as Dropout, Precision as Precision, Unit as Unit, random_stream as random_stream

__version__: str
