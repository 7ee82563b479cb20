// Text from files that a terminal is given: nothing of it is obeyed, and all of it is UTF-8.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/shown.h"
#include "shardproof/base/check.h"
#include "shardproof/base/escape.h"

using namespace shardproof;

namespace {

std::string refusal_of(const std::string& text, int64_t number) {
  try {
    SHARD_REQUIRE(false, "escape", "{}: {} of {:>3} lies in '{}'", text, std::string_view(text), number, text.c_str());
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Bytes of any kind, and pieces of them that mean something to a terminal or to a reader of UTF-8.
std::string any_text() {
  static const std::vector<std::string> pieces = {
      "\x1b]0;owned\a", "\x1b[2J", "\n", "\r", "\x7f", "\xc2\x9b" "31m", "\xe2\x80\xae", "\xe2\x81\xa6", "\xd8\x9c",
      "\xe2\x80\xa8", "\xff", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf0\x9f\x98\x80", "\xc3\xa4",
      "layers.0.weight", "\\x1b"};
  std::string text;
  for (int64_t i = *rc::gen::inRange<int64_t>(0, 8); i > 0; --i)
    text += *rc::gen::oneOf(rc::gen::elementOf(pieces), rc::gen::container<std::string>(rc::gen::arbitrary<char>()));
  return text;
}

}  // namespace

RC_GTEST_PROP(Escape, any_text_can_be_shown_once_it_is_escaped, ()) {
  const std::string text = any_text();
  RC_ASSERT(can_be_shown(escaped(text)));
  RC_ASSERT(can_be_shown(escaped_lines(text), /*lines=*/true));
  RC_ASSERT(is_utf8(text) || !can_be_shown(text, true));
}

RC_GTEST_PROP(Escape, a_text_that_can_be_shown_stays_as_it_is, ()) {
  const std::string text = any_text();
  RC_ASSERT(escaped(escaped(text)) == escaped(text));
  if (can_be_shown(text)) RC_ASSERT(escaped(text) == text);
  if (can_be_shown(text, true)) RC_ASSERT(escaped_lines(text) == text);
}

TEST(Escape, every_byte_that_is_hidden_is_written_in_hexadecimal) {
  EXPECT_EQ(escaped("a\x1b]0;owned"), "a\\x1b]0;owned");
  EXPECT_EQ(escaped("layers.\xc3\xa4.\xf0\x9f\x98\x80"), "layers.\xc3\xa4.\xf0\x9f\x98\x80");
  EXPECT_EQ(escaped("\xe2\x80\xae" "abc\xff\n"), "\\xe2\\x80\\xaeabc\\xff\\x0a");
  EXPECT_EQ(escaped_lines("one\ntwo\r"), "one\ntwo\\x0d");
  EXPECT_EQ(escaped("\xf0\x9f\x98"), "\\xf0\\x9f\\x98");
  EXPECT_TRUE(is_utf8("\x1b"));
  EXPECT_FALSE(is_utf8("\xed\xa0\x80"));
}

RC_GTEST_PROP(Escape, messages_of_errors_can_be_shown, ()) {
  const std::string text = any_text();
  RC_ASSERT(can_be_shown(Error(text).what(), true));
  RC_ASSERT(can_be_shown(NonFiniteError(text).what(), true));
  RC_ASSERT(can_be_shown(BrokenInvariant(text).what(), true));
}

RC_GTEST_PROP(Escape, a_text_that_is_put_into_a_message_adds_no_lines, ()) {
  const std::string text = any_text();
  const std::string whole = escaped(text), to_its_end = escaped(text.c_str());
  RC_ASSERT(refusal_of(text, 7) == "[escape] " + whole + ": " + whole + " of   7 lies in '" + to_its_end + "'");
  RC_ASSERT(can_be_shown(refusal_of(text, 7)));
}

namespace {

std::string utf8(uint32_t code, size_t bytes) {
  if (bytes == 1) return {static_cast<char>(code)};
  std::string text(bytes, '\0');
  for (size_t i = bytes - 1; i > 0; --i, code >>= 6) text[i] = static_cast<char>(0x80 | (code & 0x3F));
  text[0] = static_cast<char>((0xF00u >> bytes & 0xFF) | code);
  return text;
}

size_t bytes_of(uint32_t code) {
  return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}

// Controls, and what Unicode lists as Bidi_Control, or as a separator of lines or paragraphs.
bool is_hidden(uint32_t code) {
  if (code < 0x20 || (code >= 0x7F && code <= 0x9F)) return true;
  for (const uint32_t mover :
       {0x061C, 0x200E, 0x200F, 0x2028, 0x2029, 0x202A, 0x202B, 0x202C, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068, 0x2069})
    if (code == mover) return true;
  return false;
}

std::string in_hexadecimal(const std::string& text) {
  std::string result;
  for (const char byte : text) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return result;
}

}  // namespace

TEST(Escape, of_all_characters_just_controls_and_movers_of_text_are_escaped) {
  for (uint32_t code = 0; code <= 0x110000; ++code) {
    const bool is_character = (code < 0xD800 || code > 0xDFFF) && code <= 0x10FFFF;
    const std::string text = utf8(code, bytes_of(code));
    ASSERT_EQ(is_utf8(text), is_character) << std::hex << code;
    ASSERT_EQ(escaped(text), is_character && !is_hidden(code) ? text : in_hexadecimal(text)) << std::hex << code;
    ASSERT_EQ(escaped_lines(text), code == '\n' ? text : escaped(text)) << std::hex << code;
    if (bytes_of(code) < 4) {
      ASSERT_FALSE(is_utf8(utf8(code, bytes_of(code) + 1))) << "a longer form, " << std::hex << code;
    }
    if (text.size() > 1) {
      ASSERT_FALSE(is_utf8(text.substr(0, text.size() - 1))) << std::hex << code;
    }
  }
}
