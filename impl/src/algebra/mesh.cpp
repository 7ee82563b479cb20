#include "shardproof/algebra/mesh.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr int64_t kRanksMax = std::numeric_limits<int32_t>::max();

bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || c == '_';
}
bool continues_name(char c) {
  return starts_name(c) || (c >= '0' && c <= '9');
}
bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_name(std::string_view name) {
  return !name.empty() && starts_name(name.front()) && std::all_of(name.begin(), name.end(), continues_name);
}

std::string listed(const std::vector<Axis>& axes) {
  if (axes.empty()) return "no axes";
  std::string names;
  for (const Axis& axis : axes) names += (names.empty() ? "" : ", ") + axis.name;
  return names;
}

// Reads one mesh text from left to right; every error names the 1-based column where it stands.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  std::vector<Axis> axes() {
    std::vector<Axis> axes;
    if (text_.empty()) return axes;
    for (;;) {
      read_axis(axes);
      if (at_ == text_.size()) return axes;
      require(text_[at_] == ',', at_, "expected ',' or the end after a size");
      ++at_;
    }
  }

 private:
  void read_axis(std::vector<Axis>& axes) {
    const size_t name_at = at_;
    require(at_ < text_.size() && starts_name(text_[at_]), at_, "expected an axis name ([a-z_][a-z0-9_]*)");
    while (at_ < text_.size() && continues_name(text_[at_])) ++at_;
    const std::string_view name = text_.substr(name_at, at_ - name_at);
    const bool fresh =
        std::none_of(axes.begin(), axes.end(), [&](const Axis& axis) { return axis.name == name; });
    require(fresh, name_at, fmt::format("axis `{}` is named twice", name));
    require(at_ < text_.size() && text_[at_] == '=', at_, fmt::format("expected '=' after axis `{}`", name));
    ++at_;
    const size_t size_at = at_;
    const int64_t size = read_size(name);
    ranks_ *= size;  // both factors are at most 2^31 - 1
    require(ranks_ <= kRanksMax, size_at,
            fmt::format("the product of the sizes may be at most {}", kRanksMax));
    axes.push_back({std::string(name), size});
  }

  int64_t read_size(std::string_view name) {
    const size_t size_at = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    require(at_ > size_at, size_at, fmt::format("expected the size of axis `{}` in digits", name));
    int64_t size = 0;
    const auto [end, error] = std::from_chars(text_.data() + size_at, text_.data() + at_, size);
    require(error == std::errc() && size >= 1 && size <= kRanksMax, size_at,
            fmt::format("the size of axis `{}` must be between 1 and {}", name, kRanksMax));
    return size;
  }

  void require(bool condition, size_t at, const std::string& expectation) const {
    const std::string found = at < text_.size() ? fmt::format("'{}'", text_.substr(at)) : "the end";
    SHARD_REQUIRE(condition, "mesh",
                  "column {} of \"{}\": {}, got {}; write axis=size,axis=size as in dp_shard=2,tp=3", at + 1,
                  text_, expectation, found);
  }

  std::string_view text_;
  size_t at_ = 0;
  int64_t ranks_ = 1;
};

}  // namespace

Mesh::Mesh(std::vector<Axis> axes) : axes_(std::move(axes)) {
  for (size_t i = 0; i < axes_.size(); ++i) {
    const Axis& axis = axes_[i];
    SHARD_REQUIRE(is_name(axis.name), "mesh",
                  "axis {} is named \"{}\"; a name is [a-z_][a-z0-9_]*, as dp_shard", i, axis.name);
    SHARD_REQUIRE(axis.size >= 1, "mesh", "axis `{}` must have a size of at least 1, got {}", axis.name,
                  axis.size);
    for (size_t j = 0; j < i; ++j)
      SHARD_REQUIRE(axes_[j].name != axis.name, "mesh",
                    "axis `{}` is named twice; give each axis its own name", axis.name);
    SHARD_REQUIRE(axis.size <= kRanksMax / size_, "mesh",
                  "the product of the sizes may be at most {}, and axis `{}` of size {} takes {} past it",
                  kRanksMax, axis.name, axis.size, size_);
    size_ *= axis.size;
  }
}

Mesh Mesh::parse(std::string_view text) {
  return Mesh(Reader(text).axes());
}

bool Mesh::has(std::string_view axis) const {
  return std::any_of(axes_.begin(), axes_.end(), [&](const Axis& each) { return each.name == axis; });
}

int64_t Mesh::index(std::string_view axis) const {
  for (size_t i = 0; i < axes_.size(); ++i)
    if (axes_[i].name == axis) return static_cast<int64_t>(i);
  throw Error(
      fmt::format("[mesh] there is no axis `{}` in mesh \"{}\"; it has {}", axis, str(), listed(axes_)));
}

std::vector<int64_t> Mesh::coordinates(int64_t rank) const {
  SHARD_REQUIRE(rank >= 0 && rank < size_, "mesh", "rank {} is outside mesh \"{}\" of {} ranks", rank, str(),
                size_);
  std::vector<int64_t> coordinates(axes_.size());
  for (size_t i = axes_.size(); i-- > 0; rank /= axes_[i].size) coordinates[i] = rank % axes_[i].size;
  return coordinates;
}

int64_t Mesh::coordinate(int64_t rank, std::string_view axis) const {
  return coordinates(rank)[index(axis)];
}

int64_t Mesh::rank(const std::vector<int64_t>& coordinates) const {
  SHARD_REQUIRE(coordinates.size() == axes_.size(), "mesh", "mesh \"{}\" has {} axes, got {} coordinates",
                str(), axes_.size(), coordinates.size());
  int64_t rank = 0;
  for (size_t i = 0; i < axes_.size(); ++i) {
    SHARD_REQUIRE(coordinates[i] >= 0 && coordinates[i] < axes_[i].size, "mesh",
                  "coordinate {} is outside axis `{}` of size {} (mesh \"{}\")", coordinates[i],
                  axes_[i].name, axes_[i].size, str());
    rank = rank * axes_[i].size + coordinates[i];
  }
  return rank;
}

std::vector<int64_t> Mesh::peers(int64_t rank, const std::vector<std::string>& axes) const {
  std::vector<int64_t> at = coordinates(rank);
  std::vector<size_t> along;
  for (const std::string& axis : axes) {
    const size_t i = index(axis);
    SHARD_REQUIRE(std::find(along.begin(), along.end(), i) == along.end(), "mesh",
                  "peers along axis `{}` twice (mesh \"{}\"); name it once", axis, str());
    along.push_back(i);
    at[i] = 0;
  }
  std::vector<int64_t> peers{this->rank(at)};
  for (const size_t i : along) {
    int64_t stride = 1;
    for (size_t j = i + 1; j < axes_.size(); ++j) stride *= axes_[j].size;
    std::vector<int64_t> wider;
    for (const int64_t peer : peers)
      for (int64_t c = 0; c < axes_[i].size; ++c) wider.push_back(peer + c * stride);
    peers = std::move(wider);
  }
  return peers;
}

std::string Mesh::str() const {
  std::string text;
  for (const Axis& axis : axes_)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  return text;
}

}  // namespace shardproof
