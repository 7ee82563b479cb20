// Where a file is kept by Git LFS and was not fetched, a text of three lines is in its place.
#pragma once

#include <string>
#include <string_view>

#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

// What the text begins with (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
constexpr std::string_view kLfsPointerBegin = "version https://git-lfs.github.com/spec/";

// Throws Error when the text begins as a pointer. `name`: of the file that it is in.
inline void require_no_lfs_pointer(std::string_view text, const std::string& name) {
  SHARD_REQUIRE(!text.starts_with(kLfsPointerBegin), "checkpoint",
                "{}: this is a pointer of Git LFS, a small text in the place of the file. Fetch the file itself: run `git lfs "
                "install` and then `git lfs pull` in its folder",
                name);
}

// The same for a file, of which `begin` is read already. It reads more only where that is what a pointer begins with.
inline void require_no_lfs_pointer(const ByteSource& source, std::string_view begin) {
  if (kLfsPointerBegin.starts_with(begin) && source.size() >= kLfsPointerBegin.size())
    require_no_lfs_pointer(source.read_string(0, kLfsPointerBegin.size(), kLfsPointerBegin.size()), source.name());
}

}  // namespace shardproof::checkpoint
