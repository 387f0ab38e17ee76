// Goes through PTX: words, numbers, signs. Comments are space.
#pragma once

#include <cctype>
#include <string>
#include <string_view>

#include "kernel.h"

namespace ptx {

class Scanner {
 public:
  Scanner(std::string_view text, size_t position, int line)
      : text_(text), position_(position), line_(line) {}

  int line() const { return line_; }
  size_t position() const { return position_; }

  char peek() {
    skip_space();
    return position_ < text_.size() ? text_[position_] : 0;
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++position_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected ") + c);
  }

  // Names, opcodes and numbers: %r1, $L__BB0_2, ld.global.v2.f32, 0f3F800000, L1::evict_last.
  std::string_view word() {
    peek();
    const size_t begin = position_;
    while (position_ < text_.size() && in_word()) ++position_;
    if (begin == position_) fail("expected a word");
    return text_.substr(begin, position_ - begin);
  }

  void expect(std::string_view expected) {
    const std::string_view found = word();
    if (found != expected)
      fail("expected " + std::string(expected) + ", found " + std::string(found));
  }

  // To the end of the line, or of a statement.
  void skip_line() {
    while (position_ < text_.size() && text_[position_] != '\n') ++position_;
  }
  std::string_view until(char end) {
    const size_t begin = position_;
    while (position_ < text_.size() && text_[position_] != end) line_ += text_[position_++] == '\n';
    return text_.substr(begin, position_++ - begin);
  }

  int64_t integer() {
    const bool negative = take('-');
    const std::string digits(word());
    size_t used = 0;
    const uint64_t value = std::stoull(digits, &used, 0);
    if (used != digits.size()) fail("expected an integer, found " + digits);
    return static_cast<int64_t>(negative ? -value : value);
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Refusal(what + " in line " + std::to_string(line_));
  }

 private:
  bool in_word() const {
    const char c = text_[position_];
    if (c == ':')  // of ::, not of a label
      return text_[position_ - 1] == ':' ||
             (position_ + 1 < text_.size() && text_[position_ + 1] == ':');
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
  }

  void skip_space() {
    for (; position_ < text_.size(); ++position_) {
      if (text_.compare(position_, 2, "//") == 0) skip_line();
      if (position_ >= text_.size() || !std::isspace(static_cast<unsigned char>(text_[position_])))
        return;
      line_ += text_[position_] == '\n';
    }
  }

  std::string_view text_;
  size_t position_;
  int line_;
};

}  // namespace ptx
