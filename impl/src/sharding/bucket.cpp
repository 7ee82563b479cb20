#include "sharding/bucket.h"

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

// How gradients lie among the ranks that train one model, which sum or cut them; along other axes each has some of its own.
Layout of_one_model(const BucketContext& context, const BucketParameter& member, const Placement& at) {
  Layout layout = at.layout;
  for (const Axis& axis : at.mesh.axes())
    if (!layout.splits(axis.name) && !member.own.mesh.has(axis.name) && !std::ranges::count(context.rules.sum_axes, axis.name))
      layout = add_partial(std::move(layout), axis.name);
  return layout;
}

std::vector<OwnPart> parts_of(const BucketContext& context) {
  const BucketLayout& layout = context.layout;
  std::vector<OwnPart> parts;
  for (const BucketParameter& member : layout.members())
    parts.push_back({&member, std::ssize(parts), layout.placement(member, layout.state()), {}, {}});
  for (const Segment& segment : layout.state().segments) {
    OwnPart& part = parts[static_cast<size_t>(segment.member)];
    const BucketParameter& member = *part.parameter;
    SHARD_CHECK(part.local.size() == 0, "bucket", "the optimizer's part of {} lies in several pieces", member.name);
    part.local = {segment.local, segment.local + segment.size()};
    part.first_copies = first_copies(member.whole, part.at.mesh, of_one_model(context, member, part.at), layout.rank());
    for (Interval& run : part.first_copies) run = {segment.local + run.begin, segment.local + run.end};
  }
  std::ranges::stable_sort(parts, {}, [](const OwnPart& part) { return part.parameter->offset; });
  return parts;
}

}  // namespace

Bucket::Bucket(BucketContext context, const Initializer& initialize)
    : context_(std::move(context)), parameters(context_, initialize), gradient(context_), parts_(parts_of(context_)) {}

const OwnPart& Bucket::part(int64_t member) const { return *std::ranges::find(parts_, member, &OwnPart::member); }

std::vector<Shard> Bucket::shards(const at::Tensor& buffer) const {
  std::vector<Shard> shards;
  for (const OwnPart& part : parts_)
    shards.push_back({part.parameter->name, part.parameter->whole, part.at, part.of(buffer)});
  return shards;
}

bool Bucket::trainable() const {
  for (const at::Tensor& view : views())
    if (view.requires_grad()) return true;
  return false;
}

bool Bucket::trains(const std::string& parameter) const {
  const auto& members = layout().members();
  return trains(
      std::find_if(members.begin(), members.end(), [&](const BucketParameter& member) { return member.name == parameter; }) -
      members.begin());
}

}  // namespace shardproof
