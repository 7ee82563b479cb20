// Files as one run of tokens: their contents laid end to end. No Torch.
//
// A token is an unsigned number of 1, 2 or 4 bytes, the least significant byte first, and the files have nothing else in them:
// no header and no padding. Of text each byte is a token.
//
// Paths: one that is a file is read whatever it holds. One that is a folder stands for the files below it, however deep,
// except hidden ones (a name with a leading dot), those under `__pycache__` and links to folders. Where a token is a byte,
// files with a zero byte among their first 8,000 are left out as well, because they are not text; where it is longer, the
// folder stands for the files whose name ends in .bin. All files together are sorted by their path as text, byte by byte; one
// that is named twice counts once. Their paths are those from the root, without links up to the file or folder that was named,
// so that the order does not depend on where a command runs and how it names its data.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace harness {

enum class TokenType { uint8, uint16, uint32 };
const char* to_string(TokenType type);
// Throws Error when there is no such type.
TokenType token_type(const std::string& name);
int64_t bytes_of_token(TokenType type);

class TokenFiles {
 public:
  // Throws Error, naming the path, when one does not exist or cannot be read, when a folder has no such file in it, when a file
  // ends inside a token, or when there is no token at all.
  TokenFiles(const std::vector<std::string>& paths, TokenType type);
  // Of a text in memory, each byte of which is a token.
  explicit TokenFiles(std::string text);

  TokenType type() const { return type_; }
  int64_t tokens() const { return tokens_; }
  int64_t bytes() const { return tokens_ * bytes_of_token(type_); }
  std::vector<std::string> files() const;

  // Tokens [begin, begin + count). They are read when asked for: the files may be larger than memory. Files of longer tokens
  // are mapped; text may lie in very many files, and each is opened when it is read. Throws Error when a file has become
  // shorter.
  std::vector<uint32_t> read(int64_t begin, int64_t count) const;
  // Of the tokens as they lie end to end, however files cut them. Up to 16 GiB every byte counts; of more, blocks of 1 MiB at
  // equal distances do, of 16 GiB at most. It reads these bytes when it is first asked for. Any thread may call it.
  uint64_t fingerprint() const;
  // For a message: which file token `index` lies in, and where.
  std::string place(int64_t index) const;

 private:
  class Mapping;
  struct File {
    std::string path;
    int64_t begin = 0;  // of its tokens among all
    int64_t end = 0;
    std::shared_ptr<const Mapping> mapping;  // null: opened when it is read
  };
  const File& file_of(int64_t index) const;
  void read_bytes(int64_t begin, int64_t count, unsigned char* to) const;  // of tokens

  std::vector<File> files_;
  TokenType type_;
  std::string text_;  // in the place of files
  int64_t tokens_ = 0;
  mutable std::once_flag fingerprint_once_;
  mutable uint64_t fingerprint_ = 0;
};

}  // namespace harness
