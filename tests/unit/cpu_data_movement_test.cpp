// SPDX-License-Identifier: Apache-2.0
// Kernels that mostly move data: patches, token sequences, strided copies.
#include <sherd/kernels/cpu/patchify.h>
#include <sherd/kernels/cpu/strided_copy.h>
#include <sherd/kernels/cpu/tokens.h>

#include "cpu_kernel_test.h"

#include <numeric>

using namespace sherd;
using namespace sherd::cpu;
using namespace sherd::cpu::test;

#define ALL_TYPES double, float, bf16, f16

namespace {

// The permutation written as seven loops.
template <typename T>
std::vector<T> plain_patchify(const PatchShape& s, const std::vector<T>& images) {
  std::vector<T> out;
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t t = 0; t < s.time; t += s.patch_time)
      for (std::int64_t h = 0; h < s.height; h += s.patch_height)
        for (std::int64_t w = 0; w < s.width; w += s.patch_width)
          for (std::int64_t c = 0; c < s.channels; ++c)
            for (std::int64_t dt = 0; dt < s.patch_time; ++dt)
              for (std::int64_t dh = 0; dh < s.patch_height; ++dh)
                for (std::int64_t dw = 0; dw < s.patch_width; ++dw) {
                  const std::int64_t at =
                      (((b * s.channels + c) * s.time + t + dt) * s.height + h + dh) * s.width + w +
                      dw;
                  out.push_back(images[static_cast<std::size_t>(at)]);
                }
  return out;
}

template <typename T>
void check_patches(const PatchShape& s) {
  std::vector<T> images(
      static_cast<std::size_t>(s.batch * s.channels * s.time * s.height * s.width));
  std::iota(images.begin(), images.end(), T(1));
  const auto expected = plain_patchify(s, images);
  const auto n = static_cast<std::int64_t>(images.size());
  for (int threads = 1; threads <= 3; ++threads) {
    Guarded<T> patches(n), back(n);
    patchify(threads, s, sizeof(T), images.data(), patches.data());
    CHECK(patches.values() == expected);
    unpatchify(threads, s, sizeof(T), patches.data(), back.data());
    CHECK(back.values() == images);
  }
}

}  // namespace

TEST_CASE("cpu patchify and back") {
  PatchShape still{3, 3, 1, 12, 20, 1, 4, 5};
  PatchShape video{2, 4, 6, 8, 9, 3, 2, 3};
  PatchShape whole{1, 1, 1, 7, 7, 1, 7, 7};
  PatchShape pixels{2, 2, 2, 3, 5, 1, 1, 1};
  for (const PatchShape& s : {still, video, whole, pixels}) {
    check_patches<std::uint8_t>(s);
    check_patches<std::uint16_t>(s);
    check_patches<float>(s);
    check_patches<double>(s);
  }
  for (const std::int64_t width : {4, 7, 8, 14, 16, 32}) {  // the lengths with a copy of their own
    check_patches<float>({1, 2, 1, 4, 2 * width, 1, 2, width});
    check_patches<std::uint16_t>({1, 2, 1, 4, 2 * width, 1, 2, width});
  }
}

TEST_CASE_TEMPLATE("cpu tokens: assemble and its backward", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t dim : kSizes) {
    for (const bool has_cls : {false, true}) {
      CAPTURE(dim);
      const std::int64_t batch = 5, patch_tokens = 7, tokens = patch_tokens + (has_cls ? 1 : 0);
      const auto patches = random_values<T>(batch * patch_tokens * dim, 1);
      const auto cls = random_values<T>(dim, 2), pos = random_values<T>(tokens * dim, 3);
      std::vector<T> expected, no_pos;
      for (std::int64_t i = 0; i < batch * tokens * dim; ++i) {
        const std::int64_t d = i % dim, token = i / dim % tokens, b = i / dim / tokens;
        const std::int64_t patch = token - (has_cls ? 1 : 0);
        const T from =
            patch < 0 ? cls[static_cast<std::size_t>(d)]
                      : patches[static_cast<std::size_t>((b * patch_tokens + patch) * dim + d)];
        const T position = pos[static_cast<std::size_t>(token * dim + d)];
        no_pos.push_back(from);
        expected.push_back(T(static_cast<A>(from) + static_cast<A>(position)));
      }
      AssembleTokens<T> p;
      p.batch = batch;
      p.patch_tokens = patch_tokens;
      p.dim = dim;
      p.patches = patches.data();
      p.cls = has_cls ? cls.data() : nullptr;
      p.pos = pos.data();
      Guarded<T> out(batch * tokens * dim);
      p.out = out.data();
      assemble_tokens<T>(2, p);
      CHECK(same_bits(out.values(), expected));
      p.pos = nullptr;
      assemble_tokens<T>(2, p);
      CHECK(same_bits(out.values(), no_pos));

      const auto grad = random_values<T>(batch * tokens * dim, 4);
      std::vector<T> grad_patches;
      std::vector<A> grad_pos(static_cast<std::size_t>(tokens * dim));
      for (std::size_t i = 0; i < grad.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        if (!has_cls || at / dim % tokens > 0) grad_patches.push_back(grad[i]);
        grad_pos[i % grad_pos.size()] += static_cast<A>(grad[i]);
      }
      for (int threads = 1; threads <= 3; ++threads) {
        Guarded<T> got_patches(batch * patch_tokens * dim);
        Guarded<A> got_cls(dim), got_pos(tokens * dim);
        AssembleTokensBackward<T> q;
        q.batch = batch;
        q.patch_tokens = patch_tokens;
        q.dim = dim;
        q.has_cls = has_cls;
        q.grad_out = grad.data();
        q.grad_patches = got_patches.data();
        q.grad_cls = has_cls ? got_cls.data() : nullptr;
        q.grad_pos = got_pos.data();
        assemble_tokens_backward<T>(threads, q);
        CHECK(same_bits(got_patches.values(), grad_patches));
        CHECK(same_bits(got_pos.values(), grad_pos));  // the same order of the same additions
        if (has_cls) {
          CHECK(same_bits(got_cls.values(), {grad_pos.begin(), grad_pos.begin() + dim}));
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("cpu tokens: mean and selection", T, ALL_TYPES) {
  using A = acc_t<T>;
  for (const std::int64_t dim : kSizes) {
    const TokenShape s{3, 9, dim};
    const std::int64_t n = s.batch * s.tokens * dim;
    const auto in = random_values<T>(n, 1, 1, 0.3), grad = random_values<T>(s.batch * dim, 2);
    for (const std::int64_t skip : {0, 1, 8}) {
      const auto kept = static_cast<double>(s.tokens - skip);
      std::vector<double> exact(static_cast<std::size_t>(s.batch * dim));
      std::vector<A> plain(exact.size());
      std::vector<double> exact_grad;
      for (std::int64_t i = 0; i < n; ++i) {
        const bool counts = i / dim % s.tokens >= skip;
        const auto to = static_cast<std::size_t>(i / dim / s.tokens * dim + i % dim);
        const T value = in[static_cast<std::size_t>(i)];
        if (counts) exact[to] += to_double(value) / kept;
        if (counts) plain[to] += static_cast<A>(value);
        exact_grad.push_back(counts ? to_double(grad[to]) / kept : 0);
      }
      for (A& v : plain) v /= static_cast<A>(kept);
      Guarded<T> out(s.batch * dim), grad_in(n);
      mean_tokens<T>(2, s, skip, in.data(), out.data());
      check_as_good_as(out.values(), exact, converted<T>(plain));
      mean_tokens_backward<T>(2, s, skip, grad.data(), grad_in.data());
      check_as_good_as(grad_in.values(), exact_grad, converted<T>(exact_grad), 3);
      check_threads<T>(s.batch * dim, [&](int threads, T* to) {
        mean_tokens<T>(threads, s, skip, in.data(), to);
      });
    }
    for (const std::int64_t token : {0, 4, 8}) {
      std::vector<T> chosen, back;
      for (std::int64_t i = 0; i < n; ++i) {
        const bool is_it = i / dim % s.tokens == token;
        const auto to = static_cast<std::size_t>(i / dim / s.tokens * dim + i % dim);
        if (is_it) chosen.push_back(in[static_cast<std::size_t>(i)]);
        back.push_back(is_it ? grad[to] : T());
      }
      Guarded<T> out(s.batch * dim), grad_in(n);
      select_token<T>(2, s, token, in.data(), out.data());
      CHECK(same_bits(out.values(), chosen));
      select_token_backward<T>(2, s, token, grad.data(), grad_in.data());
      CHECK(same_bits(grad_in.values(), back));
    }
  }
}

namespace {

template <typename Word>
void check_view(const StridedView& view, const std::vector<Word>& memory, std::int64_t origin) {
  std::int64_t n = 1;
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) n *= view.size[d];
  std::vector<Word> expected;
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t rest = i, at = origin;
    for (auto d = static_cast<std::size_t>(view.rank); d-- > 0;) {
      at += rest % view.size[d] * view.stride[d];
      rest /= view.size[d];
    }
    expected.push_back(memory[static_cast<std::size_t>(at)]);
  }
  for (int threads = 1; threads <= 3; ++threads) {
    Guarded<Word> out(n);
    strided_copy(threads, view, sizeof(Word), memory.data() + origin, out.data());
    CHECK(out.values() == expected);
  }
}

template <typename Word>
void check_views() {
  std::vector<Word> memory(100000);
  std::iota(memory.begin(), memory.end(), Word(0));
  check_view<Word>({0, {}, {}}, memory, 7);
  check_view<Word>({1, {17}, {1}}, memory, 3);
  check_view<Word>({1, {17}, {5}}, memory, 3);
  check_view<Word>({1, {17}, {-2}}, memory, 50);
  check_view<Word>({2, {0, 5}, {5, 1}}, memory, 0);
  check_view<Word>({2, {33, 65}, {1, 33}}, memory, 0);                // transposed
  check_view<Word>({2, {300, 257}, {1, 300}}, memory, 0);             // transposed, several tasks
  check_view<Word>({3, {5, 17, 33}, {1, 5, 85}}, memory, 0);          // reversed
  check_view<Word>({3, {4, 9, 50}, {450, 50, 1}}, memory, 0);         // contiguous
  check_view<Word>({3, {4, 9, 20}, {450, 50, 1}}, memory, 11);        // sliced
  check_view<Word>({4, {2, 3, 5, 16}, {240, 16, 48, 1}}, memory, 0);  // heads taken apart
  check_view<Word>({4, {3, 4, 5, 6}, {0, 6, 0, 1}}, memory, 1);       // broadcast
  check_view<Word>({5, {2, 1, 3, 1, 4}, {100, 7, 4, 9, 1}}, memory, 0);  // sizes of 1
  check_view<Word>({6, {2, 3, 2, 3, 2, 3}, {1, 2, 6, 12, 36, 72}}, memory, 0);
  check_view<Word>({6, {2, 3, 2, 3, 2, 3}, {108, 36, 18, 6, 3, 1}}, memory, 0);
  check_view<Word>({2, {40, 1000}, {1, 40}}, memory, 0);
}

}  // namespace

TEST_CASE("cpu strided_copy: any view, any element size") {
  check_views<std::uint8_t>();
  check_views<std::uint16_t>();
  check_views<std::uint32_t>();
  check_views<std::uint64_t>();
}
