#include "shardproof/comm/redistribute.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
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

namespace {

// A transfer between ranks of the group.
struct Parcel {
  int64_t peer = 0;
  Box box;
};

// The rank's number on one side of a move; -1 when it is not there.
int64_t number_of(const std::vector<int64_t>& ranks, int64_t rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : found - ranks.begin();
}

// One move on one rank of the group.
class Passage {
 public:
  Passage(const Move& move, Comm& group) : group_(group) {
    const int64_t from = number_of(move.from_ranks, group.rank()), to = number_of(move.to_ranks, group.rank());
    if (from >= 0) {
      held_.emplace(move.shape, move.from.mesh, move.from.layout, from);
      for (Transfer& transfer : plan_for_source(move.shape, move.from, move.to, from))
        leaving_.push_back({move.to_ranks[static_cast<size_t>(transfer.target)], std::move(transfer.box)});
    }
    if (to >= 0) {
      wanted_.emplace(move.shape, move.to.mesh, move.to.layout, to);
      for (Transfer& transfer : plan_for_target(move.shape, move.from, move.to, to))
        arriving_.push_back({move.from_ranks[static_cast<size_t>(transfer.source)], std::move(transfer.box)});
    }
    // all_to_all takes slices in the order of ranks. Between two ranks both lists are in the order of the plan.
    const auto by_peer = [](const Parcel& a, const Parcel& b) { return a.peer < b.peer; };
    std::stable_sort(leaving_.begin(), leaving_.end(), by_peer);
    std::stable_sort(arriving_.begin(), arriving_.end(), by_peer);
  }

  // What lies in these indices of dim 0.
  void run(Interval rows, const at::Tensor& source, const at::Tensor& target,
           const std::function<at::Tensor(int64_t)>& allocate) {
    const std::vector<Parcel> leaving = within(leaving_, rows), arriving = within(arriving_, rows);
    std::vector<int64_t> given(static_cast<size_t>(group_.size()), 0), taken = given;
    const at::Tensor packed = allocate(counted(leaving, given)), unpacked = allocate(counted(arriving, taken));
    each(leaving, packed, [&](const Box& box, const at::Tensor& part) { part.copy_(held_->view(source, box)); });
    group_.all_to_all(unpacked, packed, taken, given).wait();
    each(arriving, unpacked, [&](const Box& box, const at::Tensor& part) { wanted_->view(target, box).copy_(part); });
  }

 private:
  static std::vector<Parcel> within(const std::vector<Parcel>& parcels, Interval rows) {
    std::vector<Parcel> parts;
    for (Parcel parcel : parcels) {
      if (!parcel.box.empty()) {
        Interval& own = parcel.box.front();
        own = {std::max(own.begin, rows.begin), std::min(own.end, rows.end)};
        if (own.begin >= own.end) continue;
      }
      parts.push_back(std::move(parcel));
    }
    return parts;
  }

  static int64_t counted(const std::vector<Parcel>& parcels, std::vector<int64_t>& by_rank) {
    int64_t total = 0;
    for (const Parcel& parcel : parcels) {
      by_rank[static_cast<size_t>(parcel.peer)] += numel(parcel.box);
      total += numel(parcel.box);
    }
    return total;
  }

  template <class Act>
  static void each(const std::vector<Parcel>& parcels, const at::Tensor& packed, const Act& act) {
    int64_t offset = 0;
    for (const Parcel& parcel : parcels) {
      act(parcel.box, packed.narrow(0, offset, numel(parcel.box)).view(sizes_of(parcel.box)));
      offset += numel(parcel.box);
    }
  }

  Comm& group_;
  std::optional<Held> held_, wanted_;
  std::vector<Parcel> leaving_, arriving_;
};

}  // namespace

void move_between(const Move& move, const at::Tensor& source, const at::Tensor& target, Comm& group,
                  int64_t elements_at_once, const std::function<at::Tensor(int64_t elements)>& allocate) {
  const at::NoGradGuard no_autograd;
  SHARD_REQUIRE(move.from.layout.partial.empty() && move.to.layout.partial.empty(), "move_between",
                "terms of a sum cannot move: from {} to {}", move.from.layout.str(), move.to.layout.str());
  Passage passage(move, group);
  const int64_t rows = move.shape.empty() ? 1 : move.shape.front(), elements = c10::multiply_integers(move.shape);
  if (elements == 0) return;
  const int64_t copies = std::ranges::count(first_holders(move.shape, move.to.mesh, move.to.layout), 0);
  const int64_t row = elements / rows * copies;
  const int64_t at_once = std::max<int64_t>(1, elements_at_once / row);
  for (int64_t begin = 0; begin < rows; begin += at_once)
    passage.run({begin, std::min(rows, begin + at_once)}, source, target, allocate);
}

}  // namespace shardproof
