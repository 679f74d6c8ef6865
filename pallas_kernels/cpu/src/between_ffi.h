// What XLA calls between products and attention, and for mixtures of experts. Included by ffi.cc alone.
#pragma once

namespace {

using Floats = ffi::BufferR2<ffi::DataType::F32>;
using Ints = ffi::BufferR1<ffi::DataType::S32>;
using Numbers = ffi::Span<const float>;

bool same(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

bool is_empty(const ffi::AnyBuffer& buffer) { return buffer.element_count() == 0; }

// The numbers are: whether there is a norm, whether it rounds before the weight, eps and offset.
ffi::Error rms_of(jswa::Rms& rms, Numbers numbers, ffi::AnyBuffer weight, ffi::DataType type, int64_t size) {
  if (numbers.size() != 4) return wrong("a norm has four numbers");
  rms.there = numbers[0] != 0, rms.cast_first = numbers[1] != 0, rms.eps = numbers[2], rms.offset = numbers[3];
  if (is_empty(weight)) return ffi::Error::Success();
  if ((int64_t)weight.element_count() != size || weight.element_type() != type)
    return wrong("a norm needs a weight per column in the activations' type");
  rms.weight = weight.untyped_data();
  return ffi::Error::Success();
}

ffi::Error parts_of(jswa::Parts& parts, ffi::AnyBuffer values, ffi::AnyBuffer bias, ffi::DataType type, int64_t tokens,
                    int64_t columns) {
  const auto shape = values.dimensions();
  if (shape.size() != 3 || shape[0] == 0 || shape[1] != tokens || shape[2] != columns)
    return wrong("the parts of a product have another shape");
  if (!type_of(values.element_type(), &parts.type) || (values.element_type() != type && parts.type != Type::F32))
    return wrong("the parts of a product must be float32, or one part in the activations' type");
  if (shape[0] > 1 && parts.type != Type::F32) return wrong("several parts of a product must be float32");
  parts.values = values.untyped_data(), parts.parts = shape[0];
  if (is_empty(bias)) return ffi::Error::Success();
  if ((int64_t)bias.element_count() != columns || bias.element_type() != type)
    return wrong("a bias per column in the activations' type is needed");
  parts.bias = bias.untyped_data();
  return ffi::Error::Success();
}

// See pallas_kernels.elementwise.api.residual_norms.
ffi::Error join(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer bias, ffi::AnyBuffer x,
                ffi::AnyBuffer post_weight, ffi::AnyBuffer pre_weight, ffi::Result<ffi::AnyBuffer> y,
                ffi::Result<ffi::AnyBuffer> normed, Numbers post, Numbers pre, float keep, float add) {
  jswa::Join j{};
  if (x.dimensions().size() != 2 || !type_of(x.element_type(), &j.type) || !is_activation(j.type))
    return wrong("x must be float32, bfloat16 or float16, and have two axes");
  if (!same(y->dimensions(), x.dimensions()) || !same(normed->dimensions(), x.dimensions()) ||
      y->element_type() != x.element_type() || normed->element_type() != x.element_type())
    return wrong("the results differ from x");
  j.tokens = x.dimensions()[0], j.width = x.dimensions()[1], j.keep = keep, j.add = add;
  j.x = x.untyped_data(), j.y = y->untyped_data(), j.normed = normed->untyped_data();
  for (ffi::Error error : {parts_of(j.branch, values, bias, x.element_type(), j.tokens, j.width),
                           rms_of(j.post, post, post_weight, x.element_type(), j.width),
                           rms_of(j.pre, pre, pre_weight, x.element_type(), j.width)})
    if (error.failure()) return error;
  jswa::join(pool, j);
  return ffi::Error::Success();
}

// See pallas_kernels.elementwise.api.rotate_and_write.
ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer bias, ffi::AnyBuffer kv,
                  ffi::AnyBuffer q_weight, ffi::AnyBuffer k_weight, ffi::AnyBuffer v_weight, Floats cos, Floats sin,
                  ffi::BufferR1<ffi::DataType::F32> temperature, Ints pages, Ints offsets,
                  ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> kv_out, Numbers q_norm, Numbers k_norm,
                  Numbers v_norm, int64_t layer, ffi::Span<const int64_t> of_kv) {
  jswa::Rotation r{};
  const auto of_q = q->dimensions();
  if (of_q.size() != 3 || of_kv.size() != 5 || !same(kv_out->dimensions(), kv.dimensions()))
    return wrong("heads of another form");
  int64_t cells = 1;
  for (int64_t size : of_kv)
    if (size < 0 || __builtin_mul_overflow(cells, size, &cells)) return wrong("pages of another form");
  if (cells != (int64_t)kv.element_count()) return wrong("the pages have another size");
  if (!type_of(q->element_type(), &r.type) || !is_activation(r.type)) return wrong("no heads of this type");
  if (!type_of(kv.element_type(), &r.kv_type) || !is_activation(r.kv_type) ||
      kv_out->element_type() != kv.element_type())
    return wrong("no pages of this type");
  if (kv_out->untyped_data() != kv.untyped_data()) return wrong("pages must be updated in place");
  r.tokens = of_q[0], r.heads = of_q[1], r.head_dim = of_q[2], r.half = cos.dimensions()[1];
  r.pages = of_kv[0], r.layers = of_kv[1], r.kv_heads = of_kv[2], r.page_size = of_kv[3], r.cell = of_kv[4];
  r.layer = layer, r.q = q->untyped_data(), r.kv = kv_out->untyped_data();
  if (layer < 0 || layer >= r.layers || r.cell < r.head_dim || 2 * r.half > r.head_dim)
    return wrong("heads do not fit the pages");
  if (!same(cos.dimensions(), sin.dimensions()) || (r.half && cos.dimensions()[0] != r.tokens))
    return wrong("cos and sin of every token are needed");
  const int64_t temperatures = (int64_t)temperature.element_count();
  if ((temperatures && temperatures != r.tokens) || (int64_t)pages.element_count() != r.tokens ||
      (int64_t)offsets.element_count() != r.tokens)
    return wrong("page, offset and temperature of every token are needed");
  r.cos = cos.typed_data(), r.sin = sin.typed_data();
  r.temperature = temperatures ? temperature.typed_data() : nullptr;
  r.page_ids = pages.typed_data(), r.offsets = offsets.typed_data();
  for (int64_t i = 0; i < r.tokens; i++)
    if (r.offsets[i] < 0 || r.offsets[i] >= r.page_size) return wrong("an offset is outside of its page");
  const auto type = q->element_type();
  const int64_t columns = (r.heads + 2 * r.kv_heads) * r.head_dim;
  for (ffi::Error error : {parts_of(r.heads_of, values, bias, type, r.tokens, columns),
                           rms_of(r.norms[0], q_norm, q_weight, type, r.head_dim),
                           rms_of(r.norms[1], k_norm, k_weight, type, r.head_dim),
                           rms_of(r.norms[2], v_norm, v_weight, type, r.head_dim)})
    if (error.failure()) return error;
  jswa::rotate(pool, r);
  return ffi::Error::Success();
}

// See pallas_kernels.elementwise.sums.
ffi::Error sums(ffi::ThreadPool pool, Floats values, ffi::BufferR2<ffi::DataType::U32> keys,
                ffi::BufferR2<ffi::DataType::U32> thresholds, ffi::ResultBufferR2<ffi::DataType::F32> out) {
  jswa::Sums s{};
  s.rows = values.dimensions()[0], s.width = values.dimensions()[1], s.count = out->dimensions()[1];
  if (out->dimensions()[0] != s.rows) return wrong("every row needs its sums");
  if (keys.element_count()) {
    if (!same(keys.dimensions(), values.dimensions()) || !same(thresholds.dimensions(), out->dimensions()))
      return wrong("every number needs a key, and every sum a threshold");
    s.keys = keys.typed_data(), s.thresholds = thresholds.typed_data();
  } else if (s.count != 1) {
    return wrong("without keys a row has one sum");
  }
  s.values = values.typed_data(), s.out = out->typed_data();
  jswa::sum(pool, s);
  return ffi::Error::Success();
}

// See pallas_kernels.elementwise.sums.
ffi::Error shares(ffi::ThreadPool pool, Floats x, ffi::Result<Floats> shares,
                  ffi::ResultBufferR1<ffi::DataType::F32> logs) {
  jswa::Shares s{};
  s.rows = x.dimensions()[0], s.width = x.dimensions()[1];
  if ((int64_t)logs->element_count() != s.rows) return wrong("every row has a logarithm");
  if (shares->dimensions()[0] != s.rows || (shares->element_count() && !same(shares->dimensions(), x.dimensions())))
    return wrong("the softmax has the shape of x, or no columns");
  s.x = x.typed_data(), s.logs = logs->typed_data(), s.shares = shares->element_count() ? shares->typed_data() : nullptr;
  jswa::share(pool, s);
  return ffi::Error::Success();
}

ffi::Error glu_of(jswa::Glu& glu, int64_t activation, float clamp, float alpha) {
  if (activation < 0 || activation > (int64_t)jswa::Activation::ALPHA) return wrong("there is no such activation");
  glu = {(jswa::Activation)activation, clamp, alpha};
  return ffi::Error::Success();
}

// See pallas_kernels.cpu.experts.gated.
ffi::Error gated(ffi::ThreadPool pool, ffi::AnyBuffer gates, ffi::Result<ffi::AnyBuffer> out, int64_t activation,
                 float clamp, float alpha) {
  jswa::Gated g{};
  if (gates.dimensions().size() != 2 || out->dimensions().size() != 2 || out->dimensions()[0] != gates.dimensions()[0] ||
      gates.dimensions()[1] != 2 * out->dimensions()[1])
    return wrong("gates and ups of every row are needed");
  if (!type_of(gates.element_type(), &g.type) || !is_activation(g.type) || out->element_type() != gates.element_type())
    return wrong("no rows of this type");
  g.gates = gates.untyped_data(), g.out = out->untyped_data();
  g.rows = out->dimensions()[0], g.hidden = out->dimensions()[1];
  const ffi::Error error = glu_of(g.glu, activation, clamp, alpha);
  if (error.failure()) return error;
  jswa::activate(pool, g);
  return ffi::Error::Success();
}

// See pallas_kernels.cpu.experts.mixture. Operands behind the two matrices: their biases, if there are any, and what
// the kind of each needs.
ffi::Error mixture(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR2<ffi::DataType::S32> chosen, Floats weights,
                   ffi::AnyBuffer up, ffi::AnyBuffer down, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::AnyBuffer> gates,
                   ffi::Result<ffi::AnyBuffer> middle, int64_t up_kind, int64_t down_kind, bool by_rows, bool biased,
                   bool weight_on_input, int64_t activation, float clamp, float alpha) {
  jswa::Mixture m{};
  if (x.dimensions().size() != 2 || !same(out->dimensions(), x.dimensions()) || up.dimensions().size() < 3 ||
      down.dimensions().size() < 3)
    return wrong("a mixture of another form");
  if (!type_of(x.element_type(), &m.type) || !is_activation(m.type)) return wrong("no rows of this type");
  for (const ffi::AnyBuffer& own : {*out, *rows, *gates, *middle})
    if (own.element_type() != x.element_type()) return wrong("the results have another type than x");
  m.tokens = x.dimensions()[0], m.width = x.dimensions()[1], m.experts = up.dimensions()[0];
  m.choices = chosen.dimensions()[1];
  const int64_t pairs = m.tokens * m.choices;
  if (chosen.dimensions()[0] != m.tokens || !same(weights.dimensions(), chosen.dimensions()))
    return wrong("experts and weights of every token are needed");
  for (const ffi::AnyBuffer& own : {*rows, *gates, *middle})
    if (own.dimensions().size() != 2 || own.dimensions()[0] != pairs) return wrong("room for each pair is needed");
  m.hidden = middle->dimensions()[1];
  if (rows->dimensions()[1] != m.width || gates->dimensions()[1] != 2 * m.hidden) return wrong("gates and ups are needed");
  std::vector<ffi::AnyBuffer> all = buffers(rest, 0);
  if (up_kind < kNumbers || up_kind >= kKinds || down_kind < kNumbers || down_kind >= kKinds)
    return wrong("no such matrices");
  const size_t biases = biased ? 2 : 0, own = kOperands[up_kind], other = kOperands[down_kind];
  if (all.size() != biases + own + other) return wrong("operands are missing");
  const auto at = all.begin() + (std::ptrdiff_t)biases, middle_of = at + (std::ptrdiff_t)own;
  ffi::Error error = glu_of(m.glu, activation, clamp, alpha);
  if (error.failure()) return error;
  error = describe(m.up, *rows, up, {at, middle_of}, *gates, up_kind, by_rows, m.experts);
  if (error.failure()) return error;
  error = describe(m.down, *middle, down, {middle_of, all.end()}, *rows, down_kind, by_rows, m.experts);
  if (error.failure()) return error;
  for (size_t i = 0; i < biases; i++) {
    jswa::Product& p = i ? m.down : m.up;
    if (all[i].element_type() != x.element_type() || (int64_t)all[i].element_count() != m.experts * p.outputs)
      return wrong("a bias per output in the type of x is needed");
    p.bias = all[i].untyped_data(), p.bias_type = m.type;
  }
  m.x = x.untyped_data(), m.out = out->untyped_data(), m.chosen = chosen.typed_data(), m.weights = weights.typed_data();
  m.rows = rows->untyped_data(), m.gates = gates->untyped_data(), m.middle = middle->untyped_data();
  m.by_rows = by_rows, m.weight_on_input = weight_on_input;
  jswa::mix(pool, m);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_join, join,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Numbers>("post")
                                  .Attr<Numbers>("pre")
                                  .Attr<float>("keep")
                                  .Attr<float>("add"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::BufferR1<ffi::DataType::F32>>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Numbers>("q_norm")
                                  .Attr<Numbers>("k_norm")
                                  .Attr<Numbers>("v_norm")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("shape"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_sums, sums,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<ffi::BufferR2<ffi::DataType::U32>>()
                                  .Arg<ffi::BufferR2<ffi::DataType::U32>>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jswa_shares, shares,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>().Ret<ffi::BufferR1<ffi::DataType::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_gated, gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("clamp")
                                  .Attr<float>("alpha"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_mixture, mixture,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::DataType::S32>>()
                                  .Arg<Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("up_kind")
                                  .Attr<int64_t>("down_kind")
                                  .Attr<bool>("by_rows")
                                  .Attr<bool>("biased")
                                  .Attr<bool>("weight_on_input")
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("clamp")
                                  .Attr<float>("alpha"));

#pragma GCC visibility pop
