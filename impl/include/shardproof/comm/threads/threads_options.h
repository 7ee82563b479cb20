// How rank-threads run, when their collectives take effect and in which order sums are taken.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace shardproof {

class SchedulePolicy;  // schedule_policy.h

struct ThreadsOptions {
  // Under `parallel` rank-threads run freely, for speed. Under `serial` one runs at a time; whenever it waits, `seed` decides
  // which one is next, so that a run repeats exactly.
  enum class Schedule { parallel, serial };
  // When a collective takes effect: as soon as all ranks have called it (`eager`), only when it is waited for (`late`), or at a
  // time that the seed decides (`random`). Under `late` and `random` an output holds garbage (NaN, or bytes 0x7f) until then,
  // and an input that changes meanwhile is an error that names the rank and the call. So a missing wait is found every time.
  enum class Completion { eager, late, random };
  // `rank_order` is the sum that comm.h specifies. `ring` starts the sum of slice r at rank r + 1, as ring algorithms do, and
  // so rounds differently. It stands for backends that promise no order.
  enum class Sum { rank_order, ring };

  Schedule schedule = Schedule::parallel;
  Completion completion = Completion::eager;
  Sum sum = Sum::rank_order;
  uint64_t seed = 0;
  // A device that the ranks share. Each rank then has a stream of its own on it, which is current while its body runs, and
  // backward passes stay on the rank's thread. Collectives take tensors of that device as well as CPU tensors. They do not
  // block the host until the device is done: `Work::wait` makes the rank's current stream wait, as NCCL does. `completion` must
  // be `eager`.
  std::optional<c10::Device> device = {};
  // Decides in the place of `seed` and `completion` who is next and when collectives take effect. Threads that the library
  // starts for the ranks take part: asynchronous saves and copies of offloaded gradients happen when the policy says so. An
  // output holds garbage until then, as under `late`. Needs `schedule` to be `serial`. One world uses a policy at a time.
  std::shared_ptr<SchedulePolicy> policy = {};
};

}  // namespace shardproof
