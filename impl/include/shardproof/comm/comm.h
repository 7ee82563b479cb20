// Communication: the verbs that everything above is written with. No globals: a communicator is passed in, so many
// worlds can live in one process. A group of one is a no-op that copies input to output.
//
// Every collective must be called by all ranks of the communicator, in the same order, with tensors of the same dtype and
// the sizes stated below; `checked` (checked.h) verifies that over any backend. Tensors are contiguous and of any shape:
// only numel counts. The call returns at once; neither inputs nor outputs may be touched until `Work::wait` returned
// (reading an input is harmless). Outputs are written without bumping their autograd version.
// Sums are taken in fixed rank order, ((x0 + x1) + x2) + ..., each addition rounded to the tensor's dtype, unless the
// backend was asked for its native order. `max` and `min` propagate NaN. Never call a collective from a destructor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/base/reduce.h"

namespace shardproof {

const char* to_string(Reduce op);

enum class Op {
  all_gather,
  reduce_scatter,
  all_reduce,
  all_to_all,
  broadcast,
  send,
  recv,
  barrier,
  split
};
const char* to_string(Op op);

// One call of one rank, as backends and decorators see it.
struct Call {
  Op op = Op::barrier;
  at::Tensor output;             // undefined where the rank receives nothing: send, barrier, the root of a broadcast
  at::Tensor input;              // undefined where it gives nothing: recv, barrier, a broadcast's other ranks
  Reduce reduce = Reduce::sum;   // reduce_scatter, all_reduce
  int64_t peer = -1;             // broadcast: the root; send: the target; recv: the source
  int64_t tag = 0;               // send, recv
  std::vector<int64_t> output_sizes = {};  // all_to_all
  std::vector<int64_t> input_sizes = {};   // all_to_all
  double factor = 1;                       // of each term of a sum
};

// The elements that must agree across ranks: of all_gather the input, of reduce_scatter the output, else the tensor; 0 for
// barrier and all_to_all.
int64_t numel(const Call& call);
at::ScalarType dtype(const Call& call);
// E.g. "reduce_scatter(sum, float32 x 128)".
std::string describe(const Call& call);

// Completion of one collective on this rank.
class Work {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
  };

  Work() = default;  // already complete
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Returns when the outputs of this rank are final and its inputs may be reused. Idempotent. Throws what ended the
  // world when another rank failed, and a deadlock error when no rank can go on.
  void wait() {
    if (state_) state_->wait();
    state_.reset();
  }

 private:
  std::shared_ptr<State> state_;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  virtual ~Comm() = default;

  // For what outlives a call, as a graph does. Throws Error when no shared_ptr owns this.
  std::shared_ptr<Comm> shared();

  virtual int64_t rank() const = 0;  // within this group
  virtual int64_t size() const = 0;
  // Names the group in messages and traces, e.g. "world" or "dp_shard".
  virtual const std::string& name() const = 0;

  // Collective. Ranks that pass the same color form a group, ordered by (key, rank). A negative color joins none and
  // returns null. Law: splitting by a mesh axis' other coordinates gives groups whose ranks are Mesh::peers.
  virtual std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) = 0;
  // The same for groups that every rank can list: `ranks` are those of this rank's group, in their new order, and this rank is
  // one of them. All ranks must call it, with lists that partition the group.
  virtual std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name);

  // Memory that every rank of the group reads and writes, `bytes` of uint8, aligned to 64 and zero at first; undefined where
  // the backend has none. Collective, with equal `bytes`. Reads of what another rank wrote need a collective between.
  virtual at::Tensor shared_memory(int64_t bytes);

  // Memory on `device` that the backend has prepared for tensors of such calls, as NCCL has registered buffers; null where it
  // has none, where any memory serves as well. It is lent: whoever destroys the pointer gives it back, before the world's body
  // ends. Collective: all ranks ask, and give back, in the same order among their calls, and for equal `bytes`; the call may
  // wait for the others.
  virtual c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device);

  // Whether sums take a factor. Law: with a factor each term is multiplied by it, rounded to the dtype, before it is added.
  virtual bool premultiplies() const { return false; }

  // output: size() * input.numel() elements; rank r's input lands at r * input.numel(). The input may be that very slice
  // of the output.
  Work all_gather(at::Tensor output, at::Tensor input);
  // input: size() * output.numel(); rank r receives the sum (max, min) of everybody's r-th slice. The output may be that
  // very slice of the input.
  Work reduce_scatter(at::Tensor output, at::Tensor input, Reduce op = Reduce::sum);
  // In place.
  Work all_reduce(at::Tensor tensor, Reduce op = Reduce::sum);
  // Where `premultiplies`, and of floats: `factor` is a power of two from 2^-15 to 1, which every dtype holds.
  Work scaled_reduce_scatter(at::Tensor output, at::Tensor input, double factor);
  Work scaled_all_reduce(at::Tensor tensor, double factor);
  // Slice r of the input, input_sizes[r] elements, goes to rank r; output_sizes[r] elements arrive from it. Both lists
  // have size() entries that sum to the tensors' numel. The tensors must not overlap.
  Work all_to_all(at::Tensor output, at::Tensor input, std::vector<int64_t> output_sizes,
                  std::vector<int64_t> input_sizes);
  Work broadcast(at::Tensor tensor, int64_t root);
  // Point to point, matched by (source, target, tag) in order of calls. A send completes when its receive was called.
  Work send(at::Tensor tensor, int64_t target, int64_t tag = 0);
  Work recv(at::Tensor tensor, int64_t source, int64_t tag = 0);
  Work barrier();

  // What every verb comes down to, for decorators: checks the tensors (Error naming the call, the group and the rank),
  // answers a group of one itself, and hands the rest to `start`.
  Work issue(Call call);

 private:
  // The backend. The call is valid on this rank; whether the other ranks' calls fit is not known yet.
  virtual Work start(Call call) = 0;
};

}  // namespace shardproof
