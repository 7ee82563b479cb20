#include "shardproof/comm/redistribute.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <optional>

#include "shardproof/algebra/plan.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

std::vector<int64_t> sizes_of(const Box& box) {
  std::vector<int64_t> sizes;
  for (const Interval& interval : box) sizes.push_back(interval.size());
  return sizes;
}

// What a rank holds: boxes, end to end in one tensor.
class Held {
 public:
  Held(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank)
      : boxes_(owned(shape, mesh, layout, rank)) {
    if (layout.flat.empty()) sizes_ = local_shape(shape, mesh, layout, rank);
  }

  std::vector<int64_t> sizes() const {
    if (sizes_) return *sizes_;
    if (boxes_.size() == 1) return sizes_of(boxes_[0]);
    int64_t total = 0;
    for (const Box& box : boxes_) total += numel(box);
    return {total};
  }

  // The part of `tensor`, which is held like this, that a box inside one of ours covers.
  at::Tensor view(const at::Tensor& tensor, const Box& part) const {
    const at::Tensor run = tensor.view({-1});
    int64_t offset = 0;
    for (const Box& box : boxes_) {
      if (contains(box, part)) {
        at::Tensor region = run.narrow(0, offset, numel(box)).view(sizes_of(box));
        for (size_t d = 0; d < box.size(); ++d)
          region = region.narrow(static_cast<int64_t>(d), part[d].begin - box[d].begin, part[d].size());
        return region;
      }
      offset += numel(box);
    }
    SHARD_CHECK(false, "redistribute", "a transfer's box lies in none of the rank's boxes");
  }

 private:
  static bool contains(const Box& box, const Box& part) {
    for (size_t d = 0; d < box.size(); ++d)
      if (part[d].begin < box[d].begin || part[d].end > box[d].end) return false;
    return true;
  }

  std::vector<Box> boxes_;
  std::optional<Shape> sizes_;  // where no flat split cuts what the dims leave
};

// One call of `redistribute` on one rank.
struct Task {
  const Shape& shape;
  const Layout& from;
  const Layout& to;
  MeshComm& comms;
  Held source, target;
};

// Every transfer through one all_to_all over the whole mesh.
class GeneralExchange {
 public:
  GeneralExchange(const Task& task, const at::Tensor& local) : task_(task), local_(local) {
    const Mesh& mesh = task.comms.mesh();
    leaving_ = plan_for_source(task.shape, {mesh, task.from}, {mesh, task.to}, task.comms.rank());
    arriving_ = plan_for_target(task.shape, {mesh, task.from}, {mesh, task.to}, task.comms.rank());
  }

  at::Tensor run() {
    std::vector<int64_t> given(task_.comms.mesh().size(), 0), taken = given;
    for (const Transfer& transfer : leaving_) given[transfer.target] += numel(transfer.box);
    for (const Transfer& transfer : arriving_) taken[transfer.source] += numel(transfer.box);
    const at::Tensor input = pack();
    at::Tensor output = at::empty({total(arriving_)}, local_.options());
    task_.comms.world().all_to_all(output, input, taken, given).wait();
    return unpack(output);
  }

  // Without communication: every transfer is this rank's own.
  at::Tensor run_alone() {
    for (const Transfer& transfer : arriving_)
      SHARD_CHECK(transfer.source == task_.comms.rank(), "redistribute", "a slice needs rank {}", transfer.source);
    std::erase_if(leaving_, [&](const Transfer& transfer) { return transfer.target != task_.comms.rank(); });
    return unpack(pack());
  }

 private:
  static int64_t total(const std::vector<Transfer>& transfers) {
    int64_t elements = 0;
    for (const Transfer& transfer : transfers) elements += numel(transfer.box);
    return elements;
  }

  // Rows of the plan are ordered by target, which is the order that all_to_all takes slices in.
  at::Tensor pack() const {
    at::Tensor packed = at::empty({total(leaving_)}, local_.options());
    int64_t offset = 0;
    for (const Transfer& transfer : leaving_) {
      const int64_t length = numel(transfer.box);
      packed.narrow(0, offset, length).view(sizes_of(transfer.box)).copy_(task_.source.view(local_, transfer.box));
      offset += length;
    }
    return packed;
  }

  // A first term is copied, so that -0.0 survives; where nothing arrives there is zero.
  at::Tensor unpack(const at::Tensor& packed) const {
    at::Tensor result = at::zeros(task_.target.sizes(), local_.options());
    at::Tensor written = at::zeros(task_.target.sizes(), local_.options().dtype(at::kBool));
    int64_t offset = 0;
    for (const Transfer& transfer : arriving_) {
      const int64_t length = numel(transfer.box);
      const at::Tensor term = packed.narrow(0, offset, length).view(sizes_of(transfer.box));
      at::Tensor place = task_.target.view(result, transfer.box);
      if (task_.from.partial.empty()) {
        place.copy_(term);
      } else {
        at::Tensor before = task_.target.view(written, transfer.box);
        place.copy_(at::where(before, place + term, term));
        before.fill_(true);
      }
      offset += length;
    }
    return result;
  }

  const Task& task_;
  const at::Tensor& local_;
  std::vector<Transfer> leaving_, arriving_;
};

// Whether every rank of the mesh holds as many elements: one answer for all, so all take the same path.
bool equal_pieces(const Task& task, const Layout& layout) {
  const int64_t first = owned_numel(task.shape, task.comms.mesh(), layout, 0);
  for (int64_t rank = 1; rank < task.comms.mesh().size(); ++rank)
    if (owned_numel(task.shape, task.comms.mesh(), layout, rank) != first) return false;
  return first > 0;
}

at::Tensor all_gather(const Task& task, const CollectiveStep& collective, const at::Tensor& local) {
  Comm& group = task.comms.along(collective.axes);
  at::Tensor gathered = at::empty({group.size() * local.numel()}, local.options());
  group.all_gather(gathered, local).wait();
  if (collective.dim == kFlat) return gathered.view(task.target.sizes());
  std::vector<int64_t> pieces = local.sizes().vec();
  pieces.insert(pieces.begin(), group.size());
  return gathered.view(pieces).movedim(0, collective.dim).reshape(task.target.sizes()).contiguous();
}

at::Tensor reduce_scatter(const Task& task, const CollectiveStep& collective, const at::Tensor& local) {
  Comm& group = task.comms.along(collective.axes);
  at::Tensor slices = local.view({-1});
  if (collective.dim != kFlat) {
    std::vector<int64_t> cut = local.sizes().vec();
    cut[collective.dim] /= group.size();
    cut.insert(cut.begin() + collective.dim, group.size());
    slices = local.view(cut).movedim(collective.dim, 0).contiguous();
  }
  at::Tensor result = at::empty(task.target.sizes(), local.options());
  group.reduce_scatter(result, slices).wait();
  return result;
}

at::Tensor all_reduce(const Task& task, const CollectiveStep& collective, const at::Tensor& local) {
  at::Tensor result = local.clone();
  task.comms.along(collective.axes).all_reduce(result).wait();
  return result.view(task.target.sizes());
}

}  // namespace

at::Tensor redistribute(const at::Tensor& given, const Shape& shape, const Layout& from, const Layout& to, MeshComm& comms) {
  const at::NoGradGuard no_autograd;
  const CollectiveStep collective = lower(shape, comms.mesh(), from, to);
  const int64_t rank = comms.rank();
  const Task task{shape, from, to, comms, {shape, comms.mesh(), from, rank}, {shape, comms.mesh(), to, rank}};
  const std::vector<int64_t> sizes = task.source.sizes();
  const bool fits = given.sizes() == at::IntArrayRef(sizes) || given.sizes() == at::IntArrayRef(c10::multiply_integers(sizes));
  SHARD_REQUIRE(given.is_contiguous() && fits, "redistribute",
                "rank {} must pass a contiguous tensor of sizes [{}], or a 1-dim one, for layout {} of shape [{}], got [{}]",
                rank, fmt::join(sizes, ","), from.str(), fmt::join(shape, ","), fmt::join(given.sizes(), ","));
  const at::Tensor local = given.view(sizes);
  switch (collective.step) {
    case Step::none: return local.view(task.target.sizes());  // the same bytes; without elements, sizes may still differ
    case Step::slice: return GeneralExchange(task, local).run_alone();
    case Step::all_reduce: return all_reduce(task, collective, local);
    case Step::all_gather:
      if (equal_pieces(task, from)) return all_gather(task, collective, local);
      break;
    case Step::reduce_scatter:
      if (equal_pieces(task, to)) return reduce_scatter(task, collective, local);
      break;
    case Step::all_to_all:
    case Step::general: break;
  }
  return GeneralExchange(task, local).run();
}

}  // namespace shardproof
