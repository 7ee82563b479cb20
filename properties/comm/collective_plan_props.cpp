// The plan of a collective by itself: what all ranks give and take fits together, and carrying it out makes what the verb is
// defined to make.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>

#include "properties/kit/spec_collective_plan.h"
#include "internal/comm/collective_plan.h"

using namespace shardproof;
using spec::Collective;
using spec::Element;

namespace {

rc::Gen<Collective> collectives() {
  return rc::gen::exec([] {
    Collective c;
    c.op = *rc::gen::element(Op::all_gather, Op::split, Op::reduce_scatter, Op::all_reduce, Op::all_reduce, Op::broadcast,
                             Op::all_to_all, Op::barrier);
    c.size = *rc::gen::inRange<int64_t>(1, 9);
    c.numel = *rc::gen::inRange<int64_t>(0, 40);
    c.root = *rc::gen::inRange<int64_t>(0, c.size);
    for (int64_t from = 0; from < c.size && c.op == Op::all_to_all; ++from)
      c.sizes.push_back(*rc::gen::container<std::vector<int64_t>>(c.size, rc::gen::inRange<int64_t>(0, 5)));
    return c;
  });
}

// Carries plans out on lists of terms, and says what does not fit; nothing is written over what is there.
class Carried {
 public:
  Carried(const Collective& collective, AllReduceBy all_reduce) : size_(collective.size) {
    for (int64_t rank = 0; rank < size_; ++rank) {
      const Call call = collective.call(rank);
      plans_.emplace_back(call, rank, size_, all_reduce);
      outputs_.emplace_back(call.output.defined() ? call.output.numel() : 0);
    }
    for (int64_t rank = 0; rank < size_; ++rank) plan(rank).sums() ? sum(rank) : take(rank);
    for (int64_t rank = 0; rank < size_; ++rank) take_sums(rank);
  }

  const std::vector<Element>& output(int64_t rank) const { return outputs_[static_cast<size_t>(rank)]; }
  const std::string& misfit() const { return misfit_; }

 private:
  const CollectivePlan& plan(int64_t rank) const { return plans_[static_cast<size_t>(rank)]; }

  void write(int64_t rank, int64_t at, const Element& element) {
    auto& output = outputs_[static_cast<size_t>(rank)];
    if (at < 0 || at >= std::ssize(output))
      misfit_ = fmt::format("rank {} has no element {}", rank, at);
    else if (!output[static_cast<size_t>(at)].empty())
      misfit_ = fmt::format("element {} of rank {} comes twice", at, rank);
    else
      output[static_cast<size_t>(at)] = element;
  }

  void take(int64_t rank) {
    for (int64_t from = 0; from < size_; ++from) {
      const ElementRange given = plan(from).send_range(rank), taken = plan(rank).recv_range(from);
      if (given.length != taken.length)
        misfit_ = fmt::format("rank {} gives {} elements to rank {}, which takes {}", from, given.length, rank, taken.length);
      for (int64_t i = 0; i < taken.length; ++i) write(rank, taken.begin + i, {{from, given.begin + i}});
    }
  }

  void sum(int64_t rank) {
    const ElementRange summed = plan(rank).summed(), result = plan(rank).result();
    if (summed.length != result.length) misfit_ = fmt::format("rank {} has no place for its sum", rank);
    for (int64_t from = 0; from < size_; ++from)
      if (plan(from).send_range(rank) != summed || plan(rank).recv_range(from) != summed)
        misfit_ = fmt::format("rank {} does not get what it adds up from rank {}", rank, from);
    for (int64_t i = 0; i < summed.length; ++i) {
      Element element;
      for (const int64_t from : order_of_terms(size_)) element.push_back({from, summed.begin + i});
      write(rank, result.begin + i, element);
    }
  }

  // The second exchange. A rank's own sum is there.
  void take_sums(int64_t rank) {
    for (int64_t from = 0; from < size_; ++from) {
      const ElementRange given = plan(from).result(), taken = plan(rank).recv_sum_range(from);
      if (taken.length == 0 || from == rank) continue;
      if (given != taken) misfit_ = fmt::format("rank {} takes another sum than rank {} gives", rank, from);
      for (int64_t i = 0; i < taken.length; ++i)
        write(rank, taken.begin + i, outputs_[static_cast<size_t>(from)][static_cast<size_t>(given.begin + i)]);
    }
  }

  int64_t size_;
  std::vector<CollectivePlan> plans_;
  std::vector<std::vector<Element>> outputs_;
  std::string misfit_;
};

}  // namespace

RC_GTEST_PROP(CollectivePlan, every_element_reaches_whoever_needs_it_once_and_sums_are_in_rank_order, ()) {
  const Collective collective = *collectives();
  const AllReduceBy all_reduce = *rc::gen::element(AllReduceBy::whole, AllReduceBy::slices);
  RC_TAG(to_string(collective.op));
  const Carried carried(collective, all_reduce);
  RC_ASSERT(carried.misfit() == "");
  for (int64_t rank = 0; rank < collective.size; ++rank) {
    const std::vector<Element> specified = collective.output(rank);
    RC_ASSERT(carried.output(rank).size() == specified.size());
    for (size_t i = 0; i < specified.size(); ++i) RC_ASSERT(carried.output(rank)[i] == specified[i]);
  }
}

RC_GTEST_PROP(CollectivePlan, equal_ranges_tile_the_elements_and_the_first_is_the_longest, ()) {
  const int64_t numel = *rc::gen::inRange<int64_t>(0, 200), parts = *rc::gen::inRange<int64_t>(1, 20);
  int64_t end = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const ElementRange range = equal_range(numel, part, parts);
    RC_ASSERT(range.begin == end);
    RC_ASSERT(range.length >= 0);
    RC_ASSERT(range.length <= equal_range(numel, 0, parts).length);
    end = range.end();
  }
  RC_ASSERT(end == numel);
  RC_ASSERT(equal_range(numel, 0, parts).length == (numel + parts - 1) / parts);
}

TEST(CollectivePlan, the_order_of_terms_goes_round_from_the_first) {
  EXPECT_EQ(order_of_terms(4), (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(order_of_terms(4, 3), (std::vector<int64_t>{3, 0, 1, 2}));
  EXPECT_EQ(order_of_terms(4, 4), (std::vector<int64_t>{0, 1, 2, 3}));
}
