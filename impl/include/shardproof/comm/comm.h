// Communication: the collectives that everything above is written with. There are no globals. A communicator is passed in, so
// one process can hold many worlds. In a group of one rank a collective copies its input to its output.
//
// All ranks of the communicator must call every collective, in the same order, with tensors of the same dtype and of the sizes
// that are stated below; `checked` (checked.h) verifies this over any backend. Tensors are contiguous. Their shape does not
// matter, only their number of elements. A call returns at once. Until `Work::wait` has returned, the caller must not write to
// inputs and must not touch outputs. Writing an output does not bump its autograd version.
// A sum is taken in the order of ranks, ((x0 + x1) + x2) + ..., and each addition is rounded to the tensor's dtype, unless the
// backend was asked for its native order. `max` and `min` propagate NaN. A destructor must not call a collective.
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

// What a backend does to a sum while its elements are in the cache, so that nobody has to read them again for it.
struct Finish {
  double factor = 1;                           // the sum is multiplied by it
  std::shared_ptr<bool> all_finite = nullptr;  // `wait` sets it: whether all of the sum is finite, on every rank
};

// One collective call of one rank, as backends and decorators see it.
struct Call {
  Op op = Op::barrier;
  at::Tensor output;             // undefined where the rank receives nothing: send, barrier, the root of a broadcast
  at::Tensor input;              // undefined where the rank sends nothing: recv, barrier, the other ranks of a broadcast
  Reduce reduce = Reduce::sum;   // reduce_scatter, all_reduce
  int64_t peer = -1;             // broadcast: the root; send: the target; recv: the source
  int64_t tag = 0;               // send, recv
  std::vector<int64_t> output_sizes = {};  // all_to_all
  std::vector<int64_t> input_sizes = {};   // all_to_all
  double factor = 1;                       // each term of a sum is multiplied by it
  Finish finish = {};                      // of a sum
};

// The number of elements that must agree across ranks: those of the input of an all_gather, of the output of a reduce_scatter,
// and of the tensor of any other call; 0 for barrier and all_to_all.
int64_t numel(const Call& call);
at::ScalarType dtype(const Call& call);
// E.g. "reduce_scatter(sum, float32 x 128)".
std::string describe(const Call& call);

// The completion of one collective on this rank.
class Work {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
  };

  Work() = default;  // already complete
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Returns when the outputs of this rank are final and its inputs may be reused. Later calls return at once. When another rank
  // failed it throws what ended the world, and when no rank can go on it throws a deadlock error.
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

  // A pointer for whatever outlives the call, as an autograd graph does. Throws Error when no shared_ptr owns this object.
  std::shared_ptr<Comm> shared();

  virtual int64_t rank() const = 0;  // this rank's number within this group
  virtual int64_t size() const = 0;
  // The name of the group in messages and traces, e.g. "world" or "dp_shard".
  virtual const std::string& name() const = 0;

  // Ranks that pass the same color form a group, which is ordered by (key, rank), as in MPI_Comm_split. A rank with a negative
  // color is in no group and gets null. Collective. Law: a split of a mesh's world by the coordinates along all other axes
  // gives groups whose ranks are Mesh::peers.
  virtual std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) = 0;
  // Does the same for groups that every rank can list. `ranks` are the ranks of this rank's new group in their new order, this
  // rank among them. The lists of all ranks must partition the group. Collective.
  virtual std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name);

  // Returns memory that every rank of the group can read and write: `bytes` elements of uint8, aligned to 64 bytes, zero at
  // first. Returns an undefined tensor where the backend has no such memory. All ranks pass equal `bytes`. Before a rank reads
  // what another rank wrote, a collective must run between the two. Collective.
  virtual at::Tensor shared_memory(int64_t bytes);

  // Returns memory on `device` that the backend has prepared for tensors of such calls, as NCCL registers buffers. Returns null
  // where the backend prepares none; any memory then serves as well. The memory is lent: destroying the pointer gives it back,
  // and that must happen before the world's body ends. All ranks ask for equal `bytes`, and ask and give back in the same order
  // among their calls. The call may wait for the other ranks. Collective.
  virtual c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device);

  // Whether this backend's sums take a factor. Law: each term is multiplied by the factor and rounded to the dtype before it is
  // added.
  virtual bool premultiplies() const { return false; }
  // Whether this backend finishes sums. Law: outputs are those of the sum alone, then multiplied by Finish::factor and rounded.
  virtual bool finishes_sums() const { return false; }

  // `output` has size() * input.numel() elements. Rank r's input arrives at element r * input.numel(). The input may be this
  // rank's own slice of the output.
  Work all_gather(at::Tensor output, at::Tensor input);
  // `input` has size() * output.numel() elements. Rank r receives the sum (or maximum, or minimum) of all ranks' r-th slices.
  // The output may be this rank's own slice of the input.
  Work reduce_scatter(at::Tensor output, at::Tensor input, Reduce op = Reduce::sum);
  // Every rank receives the sum (or maximum, or minimum) of all ranks' tensors, in the same tensor.
  Work all_reduce(at::Tensor tensor, Reduce op = Reduce::sum);
  // Sums with a factor, for floating dtypes and only where `premultiplies` is true. `factor` is a power of two from 2^-15 to 1,
  // because every floating dtype holds these exactly.
  Work scaled_reduce_scatter(at::Tensor output, at::Tensor input, double factor);
  Work scaled_all_reduce(at::Tensor tensor, double factor);
  // Sums that are finished, of float32 on the CPU and only where `finishes_sums` is true. All ranks pass the same factor, as
  // above. Each may ask whether all is finite. A reduce-scatter leaves its input as it was, except where the output lies in it.
  Work finished_reduce_scatter(at::Tensor output, at::Tensor input, Finish finish);
  Work finished_all_reduce(at::Tensor tensor, Finish finish);
  // Slice r of the input has input_sizes[r] elements and goes to rank r. Slice r of the output has output_sizes[r] elements and
  // comes from rank r. Each list has size() entries, whose sum is the number of elements of its tensor. The tensors must not
  // overlap.
  Work all_to_all(at::Tensor output, at::Tensor input, std::vector<int64_t> output_sizes,
                  std::vector<int64_t> input_sizes);
  // Every rank receives the tensor of rank `root` of this group, in a tensor of as many elements.
  Work broadcast(at::Tensor tensor, int64_t root);
  // Messages from one rank to another. A send matches the receive of the same (source, target, tag), in the order of calls. A
  // send completes once its receive has been called.
  Work send(at::Tensor tensor, int64_t target, int64_t tag = 0);
  Work recv(at::Tensor tensor, int64_t source, int64_t tag = 0);
  // Its `wait` returns when every rank of the group has made the call.
  Work barrier();

  // Every function above ends here; decorators call it too. It checks the tensors, performs the call itself in a group of one,
  // and otherwise hands it to `start`. Throws Error, which names the call, the group and the rank, when a tensor does not fit.
  Work issue(Call call);

 private:
  // Implemented by each backend. The call is valid on this rank. Whether the other ranks' calls match is not known yet.
  virtual Work start(Call call) = 0;
};

}  // namespace shardproof
