#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>

#include "checkpoint/format/cause.h"
#include "checkpoint/format/dcp_validate.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/tensor_entry.h"
#include "internal/checkpoint/format/crc32.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kMetadataBytesMax = uint64_t{1} << 31;

void require_folder(FileSystem& files, const std::string& path) {
  SHARD_REQUIRE(is_folder(files, path), "checkpoint", "there is no folder {} on {}", path, host_name());
}

class Verifier {
 public:
  Verifier(FileSystem& files, const std::string& folder, const std::function<void(double)>& progress, const VerifiedPart& part)
      : files_(files), folder_(folder), progress_(progress), part_(part) {}

  Verified run() {
    if (!describe(/*sums=*/true)) return std::move(result_);
    const std::vector<Owned> all = owned_extents(checkpoint_);
    const std::vector<const Owned*> part = part_of(all);
    for (const Owned* owned : part) bytes_all_ += owned->extent->length;
    for (const Owned* owned : part) check(*owned);
    if (sums_) check_files(all);
    return std::move(result_);
  }

  // The checkpoint without its entries, when nothing is wrong with that.
  CheckedCheckpoint open(const OpenOptions& options) {
    const auto require_whole = [this] {
      SHARD_REQUIRE(result_.problems.empty(), "checkpoint",
                    "{}/{}. Nothing was loaded; load an older checkpoint, or see `checkpoint verify`", folder_,
                    result_.problems.front().str());
    };
    describe(options.sums);
    require_whole();
    if (options.files) validate_files(files_, checkpoint_, folder_);
    if (options.files && sums_) check_files(owned_extents(checkpoint_));
    require_whole();
    return {std::move(checkpoint_), std::move(sums_), metadata_crc_};
  }

 private:
  bool describe(bool sums) {
    result_.sidecar = sums && exists(files_, folder_ + "/" + kSidecarFile);
    if (result_.sidecar) read_sidecar();
    return read_metadata_file(sums);
  }

  void report(const std::string& file, const std::string& what) { result_.problems.push_back({file, "", "", what}); }
  void report(const Owned& owned, const std::string& what) {
    result_.problems.push_back(
        {owned.extent->file, *owned.name, owned.chunk ? box_text(owned.chunk->offsets, owned.chunk->sizes) : "", what});
  }

  std::vector<const Owned*> part_of(const std::vector<Owned>& all) const {
    std::vector<const Owned*> wanted, part;
    uint64_t bytes = 0, before = 0;
    for (const Owned& owned : all)
      if (!part_.wanted || (owned.chunk && part_.wanted(*owned.extent))) {
        wanted.push_back(&owned);
        bytes += owned.extent->length;
      }
    for (const Owned* owned : wanted) {
      const double middle = static_cast<double>(before) + static_cast<double>(owned->extent->length) / 2;
      const auto index = static_cast<int64_t>(middle / static_cast<double>(bytes) * static_cast<double>(part_.count));
      if (std::min(index, part_.count - 1) == part_.index) part.push_back(owned);
      before += owned->extent->length;
    }
    return part;
  }

  void read_sidecar() {
    const std::string path = folder_ + "/" + kSidecarFile;
    try {
      sums_ = read_checksums(read_file(files_, path, kMetadataBytesMax), path);
    } catch (const Error& error) {
      report(kSidecarFile, error.what());
    }
  }

  bool read_metadata_file(bool sums) {
    const std::string path = folder_ + "/" + kMetadataFile;
    if (!exists(files_, path)) {
      report(kMetadataFile, "is missing, so this is no checkpoint, or one that was never finished");
      return false;
    }
    try {
      const std::string bytes = read_file(files_, path, kMetadataBytesMax);
      result_.bytes += bytes.size();
      metadata_crc_ = crc32(0, bytes.data(), bytes.size());
      if (sums_ && (bytes.size() != sums_->metadata_bytes || metadata_crc_ != sums_->metadata_crc))
        report(kMetadataFile, "is damaged, its checksum does not agree");
      checkpoint_ = read_metadata(bytes, path);
      validate(checkpoint_, path);
    } catch (const Error& error) {
      report(kMetadataFile, error.what());
      return false;
    }
    if (sums && checkpoint_.has_checksums && !result_.sidecar) report(kSidecarFile, "is missing, the sidecar of checksums");
    return true;
  }

  void check(const Owned& owned) {
    ++result_.entries;
    const Extent& extent = *owned.extent;
    try {
      if (extent.file != open_name_) {
        open_.reset();
        open_name_ = extent.file;
        open_ = std::make_unique<FileSource>(files_, folder_ + "/" + extent.file);
      }
      SHARD_REQUIRE(open_, "checkpoint", "{} cannot be read", extent.file);
      const SliceSource slice(*open_, extent.offset, extent.length, folder_ + "/" + extent.file);
      if (sums_) check_sum(owned, slice);
      check_entry(owned, slice, !sums_);
    } catch (const Error& error) {
      report(owned, error.what());
    }
    bytes_done_ += extent.length;
    result_.bytes += extent.length;
    if (progress_) progress_(static_cast<double>(bytes_done_) / static_cast<double>(bytes_all_));
  }

  void check_sum(const Owned& owned, const ByteSource& slice) {
    const auto found = sums_->entries.find({owned.extent->file, owned.extent->offset});
    if (found == sums_->entries.end()) return report(owned, "has no checksum in the sidecar");
    const uint32_t crc = crc_of(slice, 0, slice.size());
    if (crc != found->second) report(owned, fmt::format("is damaged: checksum {:08x}, expected {:08x}", crc, found->second));
  }

  // What the entry says of itself; with `records` all its CRCs too.
  void check_entry(const Owned& owned, const ByteSource& slice, bool records) {
    if (owned.chunk) {
      const TensorEntry entry = parse_tensor_entry(slice);
      if (entry.dtype != owned.tensor->dtype || entry.sizes != owned.chunk->sizes)
        report(owned, fmt::format("holds {} of [{}], but .metadata says {} of [{}]", dtype_info(entry.dtype).name,
                                  fmt::join(entry.sizes, ", "), dtype_info(owned.tensor->dtype).name,
                                  fmt::join(owned.chunk->sizes, ", ")));
    }
    if (!records) return;
    for (const ZipRecord& record : read_zip(slice)) check_record(slice, record);
  }

  void check_files(const std::vector<Owned>& all) {
    for (const auto& [file, bytes] : sums_->file_bytes) {
      try {
        const uint64_t size = file_bytes(files_, folder_ + "/" + file);
        if (size != bytes) report(file, fmt::format("has {} bytes, expected {}", size, bytes));
      } catch (const Error& error) {
        report(file, error.what());
      }
    }
    std::set<std::pair<std::string, uint64_t>> distinct;  // a tied tensor's names share their entries
    for (const Owned& owned : all) distinct.emplace(owned.extent->file, owned.extent->offset);
    if (sums_->entries.size() != distinct.size())
      report(kSidecarFile, fmt::format("names {} entries, .metadata names {}", sums_->entries.size(), distinct.size()));
  }

  FileSystem& files_;
  const std::string& folder_;
  const std::function<void(double)> progress_;
  const VerifiedPart part_;
  Verified result_;
  std::optional<Checksums> sums_;
  Checkpoint checkpoint_;
  std::unique_ptr<FileSource> open_;
  std::string open_name_;
  uint64_t bytes_all_ = 0, bytes_done_ = 0;
  uint32_t metadata_crc_ = 0;
};

}  // namespace

std::string Problem::str() const {
  std::string text = escaped(file);
  if (!tensor.empty()) text += fmt::format(": {}{}{}", escaped(tensor), box.empty() ? "" : " ", box);
  return text + ": " + what;
}

Verified verify_checkpoint(FileSystem& files, const std::string& folder, const std::function<void(double)>& progress,
                           const VerifiedPart& part) {
  require_folder(files, folder);
  return Verifier(files, folder, progress, part).run();
}

CheckedCheckpoint open_checked(FileSystem& files, const std::string& folder, const OpenOptions& options) {
  require_folder(files, folder);
  return Verifier(files, folder, {}, {}).open(options);
}

}  // namespace shardproof::checkpoint
