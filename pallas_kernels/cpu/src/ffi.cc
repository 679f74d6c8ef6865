// XLA calls these functions: they check shapes and types, and hand them to the kernels.
// JSWA_DIGEST names the sources and the version of XLA's interface.
#include <algorithm>
#include <cstring>

#include "between.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using jswa::Attention;
using jswa::Product;
using jswa::Type;
using jswa::bytes_of;

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("jswa: " + what); }

bool type_of(ffi::DataType from, Type* to) {
  switch (from) {
    case ffi::DataType::F32: return *to = Type::F32, true;
    case ffi::DataType::BF16: return *to = Type::BF16, true;
    case ffi::DataType::F16: return *to = Type::F16, true;
    case ffi::DataType::S8: return *to = Type::S8, true;
    case ffi::DataType::U8:
    case ffi::DataType::F8E4M3FN: return *to = Type::FP8, true;
    default: return false;
  }
}

bool is_activation(Type type) { return bytes_of(type) > 1; }

// How a matrix is held: numbers; numbers with a scale per output; codes of 4 bits with group scales and zeros; the same
// with a table of groups; MXFP4 blocks with exponents; NVFP4 codes with scales and a factor per output; signed bytes with
// group scales.
enum Kind : int64_t { kNumbers, kScaled, kCodes, kCodesByTable, kMxfp4, kNvfp4, kGrouped, kKinds };
constexpr size_t kOperands[kKinds] = {0, 1, 2, 3, 1, 2, 1};  // behind the first

// Fills in everything of a product but its rows. The operands behind the first are those that `kind` needs. If
// `experts` is not 0, the matrix and they have a leading axis of that size.
ffi::Error describe(Product& p, ffi::AnyBuffer x, ffi::AnyBuffer w, const std::vector<ffi::AnyBuffer>& rest,
                    ffi::AnyBuffer out, int64_t kind, bool by_rows, int64_t experts) {
  if (x.dimensions().size() != 2 || out.dimensions().size() != 2) return wrong("x and the result must have two axes");
  if (!type_of(x.element_type(), &p.x_type) || !is_activation(p.x_type))
    return wrong("x must be float32, bfloat16 or float16");
  if (!type_of(out.element_type(), &p.out_type) || !is_activation(p.out_type))
    return wrong("the result must be float32, bfloat16 or float16");
  if (!type_of(w.element_type(), &p.w_type)) return wrong("no products with weights of this type");
  p.x = x.untyped_data(), p.w = w.untyped_data(), p.out = out.untyped_data();
  p.inputs = x.dimensions()[1], p.outputs = out.dimensions()[1];
  if (kind < kNumbers || kind >= kKinds || rest.size() != kOperands[kind]) return wrong("operands are missing");
  const int64_t times = experts ? experts : 1;
  auto holds = [&](size_t index, int64_t numbers) { return (int64_t)rest[index].element_count() == times * numbers; };
  const auto shape = w.dimensions();
  const size_t lead = experts ? 1 : 0;
  const bool quads = !by_rows && shape.size() == lead + 3 && shape[lead + 2] == 4 * jswa::kPanel;
  if (quads && ((kind != kCodes && kind != kGrouped) || !jswa::has_quads())) return wrong("no products of such quads");
  int64_t stored = p.inputs;
  if (kind == kScaled) {
    if (!holds(0, p.outputs) || rest[0].element_type() != ffi::DataType::F32)
      return wrong("a float32 scale per output is needed");
    p.scales = (const float*)rest[0].untyped_data();
  } else if (kind == kCodes || kind == kCodesByTable || kind == kGrouped) {
    const bool bytes = kind == kGrouped;
    if ((by_rows && !bytes) || w.element_type() != (bytes ? ffi::DataType::S8 : ffi::DataType::U8) || (!bytes && p.inputs % 2))
      return wrong("no codes of this form");
    if (!type_of(rest[0].element_type(), &p.group_scales_type) || bytes_of(p.group_scales_type) < 2)
      return wrong("no group scales of this type");
    const int64_t columns = quads ? jswa::blocks(p.outputs, jswa::kPanel) * jswa::kPanel : p.outputs;
    const int64_t groups = p.outputs ? (int64_t)rest[0].element_count() / (times * columns) : 0;
    if (groups == 0 || !holds(0, groups * columns) || (!bytes && !holds(1, groups * columns)))
      return wrong("scales and zeros per group and output are needed");
    if (kind == kCodesByTable ? !holds(2, p.inputs) : p.inputs % groups != 0) return wrong("the groups do not fit the inputs");
    p.group_size = p.inputs / groups, p.groups = groups, p.group_cells = groups * columns;
    if ((quads || by_rows) && p.group_size % 32) return wrong("quads and rows need groups of neighbouring blocks");
    p.w_type = quads ? (bytes ? Type::BYTE_QUADS : Type::QUADS) : bytes ? Type::GROUPED : Type::CODES;
    stored = p.inputs * (bytes ? 2 : 1) / (quads ? 8 : 2);
    p.group_scales = rest[0].untyped_data();
    if (!bytes) p.group_zeros = (const uint8_t*)rest[1].untyped_data();
    if (kind == kCodesByTable) p.group_of = (const int32_t*)rest[2].untyped_data();
  } else if (kind == kMxfp4) {
    if (!by_rows || p.inputs % 32 || !holds(0, p.outputs * p.inputs / 32))
      return wrong("MXFP4 needs an exponent per 32 inputs");
    p.w_type = Type::MXFP4, stored = p.inputs / 2, p.group_zeros = (const uint8_t*)rest[0].untyped_data();
    p.group_cells = p.outputs * p.inputs / 32;
  } else if (kind == kNvfp4) {
    p.group_cells = jswa::blocks(p.outputs, jswa::kPanel) * jswa::kPanel * p.inputs / 16;
    if (by_rows || p.inputs % 16 || !holds(0, p.group_cells) || !holds(1, p.outputs) ||
        rest[1].element_type() != ffi::DataType::F32)
      return wrong("NVFP4 needs a scale per 16 inputs and a float32 factor per output");
    p.w_type = Type::NVFP4, stored = p.inputs / 2, p.group_zeros = (const uint8_t*)rest[0].untyped_data();
    p.scales = (const float*)rest[1].untyped_data();
  }
  const int64_t across = quads ? 4 * jswa::kPanel : jswa::kPanel;
  const bool fits = by_rows ? shape.size() == lead + 2 && shape[lead] == p.outputs && shape[lead + 1] == stored
                            : shape.size() == lead + 3 && shape[lead] == jswa::blocks(p.outputs, jswa::kPanel) &&
                                  shape[lead + 1] == stored && shape[lead + 2] == across;
  if (!fits || (experts && shape[0] != experts)) return wrong("the weights do not fit x and the result");
  p.w_bytes = (int64_t)w.size_bytes() / times;
  return ffi::Error::Success();
}

std::vector<ffi::AnyBuffer> buffers(ffi::RemainingArgs& rest, size_t first) {
  std::vector<ffi::AnyBuffer> found;
  for (size_t i = first; i < rest.size(); i++) found.push_back(*rest.get<ffi::AnyBuffer>(i));
  return found;
}

// x [rows, inputs] times panels [panels, inputs, 32], or with `by_rows` times [outputs, inputs].
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> out, int64_t kind, bool by_rows) {
  Product p{};
  ffi::Error error = describe(p, x, w, buffers(rest, 0), *out, kind, by_rows, 0);
  if (error.failure()) return error;
  p.rows = x.dimensions()[0];
  if (out->dimensions()[0] != p.rows) return wrong("x and the result have different rows");
  if (by_rows) jswa::multiply_by_rows(pool, {p});
  else jswa::multiply(pool, p);
  return ffi::Error::Success();
}

// Each expert's rows of x times its matrix. Operands: starts and sizes of the groups, the bias if there is one, and
// what `kind` needs. Rows that belong to no expert are not written.
ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::BufferR1<ffi::DataType::S32> starts,
                   ffi::BufferR1<ffi::DataType::S32> sizes, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                   int64_t kind, bool by_rows, bool biased) {
  Product all{};
  const int64_t count = (int64_t)sizes.element_count(), rows = x.dimensions()[0];
  if (count == 0 || (int64_t)starts.element_count() != count) return wrong("every expert needs a start and a size");
  if (biased && rest.size() == 0) return wrong("operands are missing");
  ffi::Error error = describe(all, x, w, buffers(rest, biased), *out, kind, by_rows, count);
  if (error.failure()) return error;
  if (out->dimensions()[0] != rows) return wrong("x and the result have different rows");
  if (biased) {
    ffi::AnyBuffer bias = *rest.get<ffi::AnyBuffer>(0);
    if (bias.element_type() != x.element_type() || (int64_t)bias.element_count() != count * all.outputs)
      return wrong("a bias per output in the type of x is needed");
    all.bias = bias.untyped_data(), all.bias_type = all.x_type;
  }
  const int32_t *first = starts.typed_data(), *size = sizes.typed_data();
  for (int64_t i = 0; i < count; i++)
    if (first[i] < 0 || size[i] < 0 || (int64_t)first[i] + size[i] > rows) return wrong("the groups are not within the rows");
  jswa::multiply_experts(pool, all, by_rows, count, [&](int64_t i) { return first[i]; }, [&](int64_t i) { return size[i]; });
  return ffi::Error::Success();
}

// See pallas_kernels.attention.api.paged_attention.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv,
                     ffi::BufferR1<ffi::DataType::S32> starts, ffi::BufferR1<ffi::DataType::S32> counts, ffi::BufferR2<ffi::DataType::S32> page_rows,
                     ffi::BufferR1<ffi::DataType::S32> first_page, ffi::BufferR1<ffi::DataType::S32> visible_from,
                     ffi::BufferR1<ffi::DataType::S32> tile_row, ffi::BufferR1<ffi::DataType::S32> tile_offset,
                     ffi::BufferR2<ffi::DataType::S32> tile_tokens, ffi::BufferR1<ffi::DataType::F32> sinks,
                     ffi::Result<ffi::AnyBuffer> out, int64_t layer, int64_t window, int64_t chunk, float scale,
                     float softcap) {
  Attention a{};
  const auto of_q = q.dimensions(), of_kv = kv.dimensions(), of_out = out->dimensions();
  if (of_q.size() != 3 || of_kv.size() != 5 || of_out.size() != 3) return wrong("queries or pages of another form");
  if (!type_of(q.element_type(), &a.q_type) || !is_activation(a.q_type) || out->element_type() != q.element_type())
    return wrong("no queries of this type");
  if (!type_of(kv.element_type(), &a.kv_type) || a.kv_type == Type::S8 || kv.element_type() == ffi::DataType::U8)
    return wrong("no pages of this type");
  a.q = q.untyped_data(), a.kv = kv.untyped_data(), a.out = out->untyped_data();
  a.starts = starts.typed_data(), a.counts = counts.typed_data(), a.page_rows = page_rows.typed_data();
  a.first_page = first_page.typed_data(), a.visible_from = visible_from.typed_data();
  a.tile_row = tile_row.typed_data(), a.tile_offset = tile_offset.typed_data();
  a.tile_tokens = tile_tokens.typed_data();
  a.tokens = of_q[0], a.heads = of_q[1], a.head_dim = of_q[2], a.v_dim = of_out[2], a.cell = of_kv[4];
  a.pages = of_kv[0], a.layers = of_kv[1], a.kv_heads = of_kv[2], a.page_size = of_kv[3], a.layer = layer;
  a.rows = counts.dimensions()[0], a.width = page_rows.dimensions()[1];
  a.tiles = tile_tokens.dimensions()[0], a.tile_size = tile_tokens.dimensions()[1];
  a.window = window, a.chunk = chunk, a.scale = scale, a.softcap = softcap;
  if (sinks.element_count()) a.sinks = sinks.typed_data();
  if (a.kv_heads == 0 || a.heads % a.kv_heads || a.cell < a.head_dim || a.cell < a.v_dim || layer < 0 ||
      layer >= a.layers || of_out[1] != a.heads)
    return wrong("queries do not fit the pages");
  if ((int64_t)sinks.element_count() != 0 && (int64_t)sinks.element_count() != a.heads)
    return wrong("a sink per head is needed");
  for (int64_t i = 0; i < a.tiles; i++)
    if (a.tile_row[i] < 0 || a.tile_row[i] >= a.rows) return wrong("a tile of no row");
  // Tokens of no tile, which are padding, get zeros.
  std::memset(a.out, 0, (size_t)(a.tokens * a.heads * a.v_dim * bytes_of(a.q_type)));
  jswa::attend(pool, a);
  return ffi::Error::Success();
}

}  // namespace

#include "between_ffi.h"

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("kind")
                                  .Attr<bool>("by_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_experts, experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("kind")
                                  .Attr<bool>("by_rows")
                                  .Attr<bool>("biased"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jswa_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR2<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR2<ffi::DataType::S32>>()
                                  .Arg<ffi::BufferR1<ffi::DataType::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

// The digest of the sources that this library is built from, and the version of XLA's interface.
extern "C" const char* jswa_digest() { return JSWA_DIGEST; }

// Whether this processor multiplies matrices in quads.
extern "C" int jswa_has_quads() { return jswa::has_quads(); }
