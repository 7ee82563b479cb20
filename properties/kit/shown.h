// Whether a text can be shown. It is judged by bytes, and by another reader of UTF-8 than the code under test has.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

// No control character but line feeds, where `lines` allows them, no character that moves the text around it, all of it UTF-8.
inline bool can_be_shown(const std::string& text, bool lines = false) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](size_t ahead) { return i + ahead < text.size() ? static_cast<unsigned char>(text[i + ahead]) : 0; };
    if ((byte(0) < 0x20 && !(lines && byte(0) == '\n')) || byte(0) == 0x7F) return false;
    if (byte(0) == 0xC2 && byte(1) < 0xA0) return false;                                         // U+0080 to U+009F
    if (byte(0) == 0xD8 && byte(1) == 0x9C) return false;                                        // U+061C
    if (byte(0) == 0xE2 && byte(1) == 0x80 && (byte(2) == 0x8E || byte(2) == 0x8F)) return false;  // U+200E, U+200F
    if (byte(0) == 0xE2 && byte(1) == 0x80 && byte(2) >= 0xA8 && byte(2) <= 0xAE) return false;    // U+2028 to U+202E
    if (byte(0) == 0xE2 && byte(1) == 0x81 && byte(2) >= 0xA6 && byte(2) <= 0xA9) return false;    // U+2066 to U+2069
  }
  try {
    nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}
