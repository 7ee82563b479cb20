// How rank-threads run, and when and in which order their collectives take effect.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace shardproof {

struct ThreadsOptions {
  // `parallel`: rank-threads run freely, for speed. `serial`: one at a time, chosen by `seed` whenever a rank waits, so
  // that a run repeats exactly.
  enum class Schedule { parallel, serial };
  // When an asynchronous collective takes effect: as soon as all ranks have called it, only when it is waited for, or by
  // the seed. Under `late` and `random`, outputs hold garbage (NaN, or 0x7f bytes) until then, and inputs that change
  // while in flight are an error naming rank and call: a missing wait is found every time.
  enum class Completion { eager, late, random };
  // `rank_order` is the specified sum; `ring` starts slice r at rank r + 1, as ring algorithms do, and so rounds
  // differently: it stands in for backends that promise no order.
  enum class Sum { rank_order, ring };

  Schedule schedule = Schedule::parallel;
  Completion completion = Completion::eager;
  Sum sum = Sum::rank_order;
  uint64_t seed = 0;
  // A device that the ranks share. Each then has a stream of its own there, current while its body runs, and backwards stay on
  // the rank's thread. Collectives take tensors of that device, beside CPU ones, and do not wait for it: `Work::wait` lets the
  // rank's current stream wait, as NCCL does. `completion` must be eager.
  std::optional<c10::Device> device = {};
};

}  // namespace shardproof
