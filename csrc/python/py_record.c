/* py_record.c - the record format from Python: sizes, encode, decode. For dumps and tests; the caches do not use it. */
#include "py_tensor.h"

#include <string.h>

#include "cpu_dispatch.h"
#include "format.h"

/* hkv_format of checked arguments. */
static int format_from_args(hkv_py_state *state, int bits, int block_size, int head_dim, hkv_dtype dtype,
                            hkv_format *format)
{
    hkv_config config;
    hkv_error error;
    hkv_config_init(&config);
    config.quantization_bits = bits;
    config.block_size = block_size;
    if (hkv_config_check(&config, &error) != HKV_OK) {
        hkv_py_raise_config(state, &error);
        return -1;
    }
    if (head_dim < 16 || head_dim > HKV_MAX_HEAD_DIM || head_dim % 16 != 0)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "head_dim", "expected 16..%d in steps of 16, got %d",
                           HKV_MAX_HEAD_DIM, head_dim);
    hkv_format_init(format, bits, block_size, head_dim, (int32_t)dtype);
    return 0;
}

static int check_has_records(hkv_py_state *state, int bits)
{
    if (bits != 0) return 0;
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, "bits", "expected 8, 6 or 4: at 0 there are no records");
}

/* The code path of the CPU in use; all of them agree bit for bit. */
static const hkv_cpu_kernels *kernels_in_use(hkv_py_state *state)
{
    const hkv_cpu_kernels *kernels;
    hkv_error error;
    if (hkv_cpu_find_path(NULL, &kernels, &error) == HKV_OK) return kernels;
    hkv_py_raise(state, &error);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------ sizes */

static PyObject *format_to_dict(const hkv_format *f)
{
    const struct {
        const char *name;
        int64_t value;
    } fields[] = {
        {"bits", f->bits},
        {"head_dim", f->head_dim},
        {"stored_dim", f->stored_dim},
        {"block_tokens", f->block_tokens},
        {"stored_tokens", f->stored_tokens},
        {"n_value_groups", f->n_value_groups},
        {"planes", f->planes},
        {"row_bytes", f->row_bytes},
        {"plane_bytes", f->plane_bytes},
        {"k_params_offset", f->k_params_offset},
        {"k_high_offset", f->k_high_offset},
        {"v_params_offset", f->v_params_offset},
        {"v_high_offset", f->v_high_offset},
        {"k_low_offset", f->k_low_offset},
        {"v_low_offset", f->v_low_offset},
        {"int4_bytes", f->int4_bytes},
        {"k8v4_bytes", f->k8v4_bytes},
        {"int8_bytes", f->int8_bytes},
        {"record_bytes", f->record_bytes},
        {"row_page_bytes", f->row_page_bytes},
    };
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < sizeof fields / sizeof *fields; i++)
        if (hkv_py_set_item(dict, fields[i].name, PyLong_FromLongLong(fields[i].value)) < 0) Py_CLEAR(dict);
    return dict;
}

static PyObject *record_layout(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bits", "block_size", "head_dim", "dtype", NULL};
    hkv_py_state *state = PyModule_GetState(module);
    int bits, block_size, head_dim;
    const char *dtype_name = "float16";
    hkv_dtype dtype;
    hkv_format format;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iii|s:record_layout", names, &bits, &block_size, &head_dim,
                                     &dtype_name) ||
        hkv_py_dtype_from_name(state, dtype_name, &dtype) < 0 ||
        format_from_args(state, bits, block_size, head_dim, dtype, &format) < 0)
        return NULL;
    return format_to_dict(&format);
}

/* ----------------------------------------------------------------------------------------------------------- encode */

/* Tokens [n, D] on the CPU. */
static int import_tokens(hkv_py_state *state, PyObject *obj, const char *argument, const int64_t *shape,
                         hkv_py_tensor *t)
{
    if (hkv_py_tensor_import(state, obj, argument, &hkv_py_host, 0, t) < 0 ||
        hkv_py_tensor_check_shape(state, t, 2, shape, "[n, D]") < 0)
        return -1;
    return hkv_py_tensor_check_layout(state, t, 0);
}

static int dtype_of_tensor(hkv_py_state *state, const hkv_py_tensor *t, hkv_dtype *dtype)
{
    *dtype = t->dtype_code == HKV_DL_BFLOAT ? HKV_BF16 : t->dtype_bits == 32 ? HKV_F32 : HKV_F16;
    return hkv_py_tensor_check_dtype(state, t, *dtype);
}

/* A header as a freshly sealed block has it, with stamp 1. */
static void header_init(const hkv_format *f, int32_t n_tokens, uint32_t n_clamped, uint8_t *record)
{
    hkv_record_header header = {
        .stamp = 1,
        .n_valid_tokens = (uint16_t)n_tokens,
        .planes = (uint8_t)f->planes,
        .tier = HKV_TIER_L1,
        .version = HKV_FORMAT_VERSION,
        .bits = (uint8_t)f->bits,
        .low_k_slot = -1,
        .low_v_slot = -1,
        .n_clamped = n_clamped,
    };
    memcpy(record, &header, sizeof header);
}

static PyObject *encode_tokens(hkv_py_state *state, const hkv_py_tensor *k, const hkv_py_tensor *v, int bits,
                               int block_size)
{
    hkv_dtype dtype;
    hkv_format format;
    if (dtype_of_tensor(state, k, &dtype) < 0 || hkv_py_tensor_check_dtype(state, v, dtype) < 0 ||
        check_has_records(state, bits) < 0 ||
        format_from_args(state, bits, block_size, k->shape[1] > INT32_MAX ? 0 : (int)k->shape[1], dtype, &format) < 0)
        return NULL;
    if (k->shape[0] < 1 || k->shape[0] > block_size) {
        hkv_py_fail(state, HKV_ERR_ARGUMENT, "k", "expected 1..%d tokens, got %lld", block_size,
                    (long long)k->shape[0]);
        return NULL;
    }
    const hkv_cpu_kernels *kernels = kernels_in_use(state);
    PyObject *bytes = kernels ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)format.record_bytes) : NULL;
    if (!bytes) return NULL;
    uint8_t *record = (uint8_t *)PyBytes_AS_STRING(bytes);
    memset(record, 0, format.record_bytes); /* the padding too: equal tokens give equal bytes */
    int32_t n_tokens = (int32_t)k->shape[0];
    uint32_t n_clamped =
        kernels->record_encode(&format, k->data, k->strides[0], v->data, v->strides[0], n_tokens, record);
    header_init(&format, n_tokens, n_clamped, record);
    return bytes;
}

static PyObject *record_encode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"k", "v", "bits", "block_size", NULL};
    hkv_py_state *state = PyModule_GetState(module);
    PyObject *k_obj, *v_obj, *bytes = NULL;
    int bits = 8, block_size = 64;
    hkv_py_tensor k = {0}, v = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$ii:record_encode", names, &k_obj, &v_obj, &bits, &block_size))
        return NULL;
    int64_t any[2] = {-1, -1};
    if (import_tokens(state, k_obj, "k", any, &k) == 0 && import_tokens(state, v_obj, "v", k.shape, &v) == 0)
        bytes = encode_tokens(state, &k, &v, bits, block_size);
    hkv_py_tensor_release(&k);
    hkv_py_tensor_release(&v);
    return bytes;
}

/* ----------------------------------------------------------------------------------------------------------- decode */

static int precision_from_name(hkv_py_state *state, const char *name, int32_t planes, hkv_precision *precision)
{
    static const char *const names[] = {[HKV_READ_INT4] = "int4", [HKV_READ_K8V4] = "k8v4", [HKV_READ_INT8] = "int8"};
    hkv_precision best = hkv_record_precision(planes);
    *precision = best;
    if (!name) return 0;
    for (int i = HKV_READ_INT4; i <= HKV_READ_INT8; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *precision = (hkv_precision)i;
        if ((hkv_precision)i <= best) return 0;
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "precision", "the record's planes reach %s, not %s", names[best],
                           name);
    }
    return hkv_py_fail(state, HKV_ERR_ARGUMENT, "precision", "expected int4, k8v4, int8 or None, got '%s'", name);
}

/* The header of a record that can be decoded as head_dim and block_size say. */
static int header_read(hkv_py_state *state, const Py_buffer *record, int block_size, int head_dim,
                       hkv_record_header *header, hkv_format *format)
{
    if (record->len < (Py_ssize_t)sizeof *header)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "record", "expected at least %zu bytes, got %zd", sizeof *header,
                           record->len);
    memcpy(header, record->buf, sizeof *header);
    if (header->version != HKV_FORMAT_VERSION)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "record", "expected format version %d, got %d", HKV_FORMAT_VERSION,
                           header->version);
    if (check_has_records(state, header->bits) < 0 ||
        format_from_args(state, header->bits, block_size, head_dim, HKV_F16, format) < 0)
        return -1;
    if (record->len < (Py_ssize_t)format->record_bytes)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "record", "expected %u bytes, got %zd", format->record_bytes,
                           record->len);
    if (header->n_valid_tokens > block_size)
        return hkv_py_fail(state, HKV_ERR_ARGUMENT, "record", "holds %d tokens, more than a block of %d",
                           header->n_valid_tokens, block_size);
    return 0;
}

static PyObject *decode_record(hkv_py_state *state, const Py_buffer *record, int block_size, int head_dim,
                               const char *precision_name)
{
    hkv_record_header header;
    hkv_format format;
    hkv_precision precision;
    float *k_data = NULL, *v_data = NULL;
    if (header_read(state, record, block_size, head_dim, &header, &format) < 0 ||
        precision_from_name(state, precision_name, header.planes, &precision) < 0)
        return NULL;
    const hkv_cpu_kernels *kernels = kernels_in_use(state);
    if (!kernels) return NULL;
    int64_t shape[2] = {header.n_valid_tokens, head_dim};
    PyObject *k = hkv_py_numpy_create_f32(2, shape, &k_data);
    PyObject *v = k ? hkv_py_numpy_create_f32(2, shape, &v_data) : NULL;
    if (!v) {
        Py_XDECREF(k);
        return NULL;
    }
    kernels->record_decode(&format, record->buf, precision, 0, header.n_valid_tokens, k_data, v_data);
    return Py_BuildValue("(NN)", k, v);
}

static PyObject *record_decode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"record", "head_dim", "block_size", "precision", NULL};
    Py_buffer record;
    int block_size = 64, head_dim = 0;
    const char *precision = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*i|$iz:record_decode", names, &record, &head_dim, &block_size,
                                     &precision))
        return NULL;
    PyObject *tokens = decode_record(PyModule_GetState(module), &record, block_size, head_dim, precision);
    PyBuffer_Release(&record);
    return tokens;
}

PyMethodDef hkv_py_record_methods[] = {
    {"record_layout", HKV_PY_FUNCTION(record_layout), METH_VARARGS | METH_KEYWORDS,
     "record_layout(bits, block_size, head_dim, dtype='float16')\n--\n\nSizes and offsets of a record and a row page."},
    {"record_encode", HKV_PY_FUNCTION(record_encode), METH_VARARGS | METH_KEYWORDS,
     "record_encode(k, v, *, bits=8, block_size=64)\n--\n\nThe record of tokens k, v [n, D] of one KV head."},
    {"record_decode", HKV_PY_FUNCTION(record_decode), METH_VARARGS | METH_KEYWORDS,
     "record_decode(record, head_dim, *, block_size=64, precision=None)\n--\n\n"
     "Its tokens k, v [n, D] as float32, at 'int4', 'k8v4', 'int8' or the best precision it holds."},
    {NULL, NULL, 0, NULL},
};
