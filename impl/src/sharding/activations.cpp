#include "sharding/activations.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "shardproof/base/check.h"

namespace shardproof {

using torch::autograd::SavedVariableHooks;

namespace {

// Each storage begins where an allocator of a GPU would let it begin: kernels round differently at other offsets.
constexpr int64_t kAlignment = 512;
// Transfers of groups that are gone, of which the host waits for the oldest when there is one more.
constexpr size_t kRetiredMax = 2;

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

}  // namespace

// What one forward of a unit has saved: views into storages, each of which is copied once.
class SavedGroup : public std::enable_shared_from_this<SavedGroup> {
 public:
  SavedGroup(const std::shared_ptr<ActivationStore>& store, std::string unit)
      : unit_(std::move(unit)), store_(store), memory_(store->memory_), transfers_(store->transfers_) {}
  ~SavedGroup() {
    try {
      for (const HostTransfer& transfer : {download_, upload_}) transfer.order();
      if (const auto store = store_.lock()) store->retire({download_, upload_});
    } catch (const c10::Error&) {  // the device failed, which its next call reports
    }
  }
  SavedGroup(const SavedGroup&) = delete;

  const std::string& unit() const { return unit_; }
  bool is_empty() const { return blocks_.empty(); }
  c10::Device device() const { return memory_->device(); }

  // The number by which `get` finds it.
  size_t keep(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    const auto [found, is_new] = block_of_.try_emplace(storage.unsafeGetStorageImpl(), blocks_.size());
    if (is_new) {
      const auto bytes = static_cast<int64_t>(storage.nbytes());
      const int64_t room = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      blocks_.push_back(
          {tensor_of(storage, {bytes}, at::kByte, device()), bytes, memory_->counted(MemoryKind::activation, room)});
      begins_.push_back(total_);
      total_ += room;
    }
    views_.push_back({SavedTensor(tensor), found->second, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
                      tensor.scalar_type()});
    return views_.size() - 1;
  }

  void start_leaving() {
    place_ = Place::leaving;
    host_ = memory_->allocate(MemoryKind::activation, total_, at::kByte, shardproof::Place::host);
    std::vector<HostCopy> copies;
    for (size_t i = 0; i < blocks_.size(); ++i)
      copies.push_back({host_.narrow(0, begins_[i], blocks_[i].bytes), blocks_[i].source});
    download_ = transfers_->download_all(std::move(copies));
  }

  void finish_leaving() {
    if (place_ != Place::leaving) return;
    place_ = Place::away;
    download_.order();
    for (View& view : views_) {
      view.is_changed = view.saved.is_changed();
      view.saved.source.reset();
    }
    blocks_.clear();
    block_of_.clear();
  }

  void start_coming() {
    if (place_ != Place::away) return;
    place_ = Place::coming;
    buffer_ = memory_->allocate(MemoryKind::activation, total_, at::kByte);
    upload_ = transfers_->upload_ahead(buffer_, host_);
  }

  at::Tensor get(size_t number) {
    if (place_ == Place::leaving) place_ = Place::kept;
    start_coming();
    if (place_ == Place::coming) place_ = Place::here;
    if (place_ == Place::here) upload_.order();  // each stream that reads
    if (place_ != Place::recording && !std::exchange(in_backward_, true))
      if (const auto store = store_.lock()) store->prefetch_before(*this);
    const View& view = views_[number];
    if (view.saved.source.defined()) {
      require_unchanged(view.saved.is_changed(), unit_);
      return view.saved.source;
    }
    require_unchanged(view.is_changed, unit_);
    return over_buffer(view);
  }

  void end_backward() {
    in_backward_ = false;
    if (place_ == Place::kept) {
      place_ = Place::leaving;
      finish_leaving();
    }
    if (place_ != Place::coming && place_ != Place::here) return;
    upload_.order();
    buffer_.reset();
    place_ = Place::away;
  }

 private:
  enum class Place { recording, leaving, kept, away, coming, here };
  struct Block {
    at::Tensor source;  // the bytes of a storage
    int64_t bytes;
    std::shared_ptr<void> counted;
  };
  struct View {
    SavedTensor saved;  // without the tensor once the device's memory is freed
    size_t block;
    std::vector<int64_t> sizes, strides;
    int64_t offset;  // in elements of the storage
    at::ScalarType dtype;
    bool is_changed = false;
  };

  at::Tensor over_buffer(const View& view) const {
    at::Tensor tensor = tensor_of(buffer_.storage(), {0}, view.dtype, device());
    const auto element = static_cast<int64_t>(c10::elementSize(view.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides, begins_[view.block] / element + view.offset);
    return tensor;
  }

  const std::string unit_;
  const std::weak_ptr<ActivationStore> store_;
  const std::shared_ptr<MemoryLedger> memory_;
  const std::shared_ptr<HostTransfers> transfers_;
  Place place_ = Place::recording;
  bool in_backward_ = false;
  std::vector<Block> blocks_;
  std::vector<int64_t> begins_;  // of blocks, in bytes
  std::unordered_map<const c10::StorageImpl*, size_t> block_of_;
  std::vector<View> views_;
  int64_t total_ = 0;
  at::Tensor host_, buffer_;
  HostTransfer download_, upload_;
};

namespace {

class KeepInGroup final : public SavedVariableHooks {
 public:
  KeepInGroup(std::shared_ptr<SavedGroup> group, const std::function<bool(const at::Tensor&)>& is_parameter)
      : group_(std::move(group)), is_parameter_(is_parameter) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const bool leaves = is_plain(tensor) && tensor.device() == group_->device() && tensor.storage().nbytes() > 0 &&
                        !(tensor.is_leaf() && tensor.requires_grad()) && !is_parameter_(tensor);
    if (leaves)
      number_ = group_->keep(tensor);
    else
      stays_.emplace(tensor);
  }
  at::Tensor call_unpack_hook() override {
    if (!stays_) return group_->get(number_);
    require_unchanged(stays_->is_changed(), group_->unit());
    return stays_->source;
  }

 private:
  const std::shared_ptr<SavedGroup> group_;
  const std::function<bool(const at::Tensor&)>& is_parameter_;  // not asked after the forward
  size_t number_ = 0;
  std::optional<SavedTensor> stays_;
};

}  // namespace

ActivationStore::ActivationStore(std::shared_ptr<MemoryLedger> memory, std::shared_ptr<HostTransfers> transfers,
                                 std::function<bool(const at::Tensor&)> is_parameter)
    : memory_(std::move(memory)), transfers_(std::move(transfers)), is_parameter_(std::move(is_parameter)) {
  ask_saved_tensor_keepers();
}

ActivationStore::~ActivationStore() = default;

void ActivationStore::begin_forward(const std::string& unit) {
  auto group = std::make_shared<SavedGroup>(shared_from_this(), unit);
  open_.push_back({std::move(group), std::exchange(saved_tensor_keeper(), weak_from_this())});
}

void ActivationStore::end_forward() {
  if (open_.empty()) return;  // an exception has ended it, and zero_gradients was called
  const std::shared_ptr<SavedGroup> group = std::move(open_.back().group);
  saved_tensor_keeper() = std::move(open_.back().keeper_before);
  open_.pop_back();
  std::erase_if(groups_, [](const std::weak_ptr<SavedGroup>& other) { return other.expired(); });
  if (group.use_count() == 1 || group->is_empty()) return;  // nothing was saved, or what was is gone
  group->start_leaving();
  for (const auto& other : groups_)
    if (const auto alive = other.lock()) alive->finish_leaving();
  groups_.push_back(group);
}

void ActivationStore::end_backward() {
  for (const auto& group : groups_)
    if (const auto alive = group.lock()) alive->end_backward();
  await_retired(0);
}

void ActivationStore::abandon_forwards() {
  while (!open_.empty()) {
    saved_tensor_keeper() = std::move(open_.back().keeper_before);
    open_.pop_back();
  }
}

void ActivationStore::prefetch_before(const SavedGroup& group) {
  std::shared_ptr<SavedGroup> before;
  for (const auto& other : groups_) {
    auto alive = other.lock();
    if (alive.get() == &group) break;
    if (alive) before = std::move(alive);
  }
  if (before) before->start_coming();
}

void ActivationStore::retire(Transfers transfers) {
  {
    const std::lock_guard lock(retired_mutex_);
    retired_.push_back(std::move(transfers));
  }
  await_retired(kRetiredMax);
}

// But for the last ones.
void ActivationStore::await_retired(size_t left) {
  while (true) {
    Transfers oldest;
    {
      const std::lock_guard lock(retired_mutex_);
      if (retired_.size() <= left) return;
      oldest = std::move(retired_.front());
      retired_.pop_front();
    }
    oldest.down.wait();
    oldest.up.wait();
  }
}

std::unique_ptr<SavedVariableHooks> ActivationStore::hooks() {
  return open_.empty() ? nullptr : std::make_unique<KeepInGroup>(open_.back().group, is_parameter_);
}

}  // namespace shardproof
