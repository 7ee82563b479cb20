// Text that comes from files, such as names of tensors and of files, is shown to people and to programs. A terminal obeys
// control characters in it, and a reader of UTF-8 stops at bytes that are none. No Torch in this header.
#pragma once

#include <string>
#include <string_view>

namespace shardproof {

// The text with every byte written as \xNN that belongs to a control character, to a character that changes the direction or
// the lines of the text around it, or to no character of UTF-8. The result is one line. A text that is fine stays as it is, so
// escaping twice is escaping once.
std::string escaped(std::string_view text);

// The same, but line feeds stay.
std::string escaped_lines(std::string_view text);

// Whether the text is UTF-8.
bool is_utf8(std::string_view text);

}  // namespace shardproof
