// Text that comes from files, such as the names of tensors and of files, is shown to people and to programs. A terminal obeys
// control characters in it, and a reader of UTF-8 stops at bytes that are not UTF-8. So such text is escaped before it is
// shown. This header does not include Torch.
#pragma once

#include <string>
#include <string_view>

namespace shardproof {

// Returns the text as one line that can be shown. It writes a byte as \xNN when the byte belongs to a control character, to a
// character that changes the direction or the lines of the text around it, or to no character of UTF-8. A text without such
// bytes stays as it is. Law: escaped(escaped(text)) == escaped(text).
std::string escaped(std::string_view text);

// Does the same, but keeps line feeds.
std::string escaped_lines(std::string_view text);

// Whether the text is UTF-8.
bool is_utf8(std::string_view text);

}  // namespace shardproof
