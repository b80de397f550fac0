/* Reads records from the librdkafka client that a confluent_kafka.Consumer holds.
 *
 * No record becomes a Python object: a read returns the values, keys, offsets and times of many
 * records as a few byte strings, laid out as Arrow lays out its columns.
 *
 * The client stays the Consumer's: its configuration, authentication and callbacks. Only the queues
 * of the partitions that `take_over` names are led to a queue of this module, by the public
 * functions of librdkafka. No callback is served from that queue, so none runs inside a read; the
 * owner has to call `Consumer.poll(0)` now and then, which serves them.
 *
 * Two things here are no public interface, and are checked before they are trusted:
 * - the client is the first field behind the object's head (`Handle` of confluent_kafka.h). The
 *   caller names the size of the objects whose layout it knows, and another size is refused;
 * - functions are looked up in the very library that confluent_kafka.cimpl is linked with.
 */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* From librdkafka's public header; the same in all of its 1.x and 2.x. */
typedef struct {
    int err;
    void *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *private_;
} Message;

#define CONSUMER_TYPE 1
#define VERSION_MIN 0x02000000
#define VERSION_MAX 0x02ffffff

/* How many messages are taken at once at most, so that few bytes are read beyond `bytes_max`. */
#define STEP_MAX 256

static struct {
    void *library;
    int (*version)(void);
    const char *(*name)(const void *client);
    int (*type)(const void *client);
    void *(*queue_new)(void *client);
    void (*queue_destroy)(void *queue);
    void *(*queue_get_partition)(void *client, const char *topic, int32_t partition);
    void (*queue_forward)(void *from, void *to);
    void (*queue_yield)(void *queue);
    ssize_t (*consume_batch_queue)(void *queue, int timeout_ms, Message **messages, size_t count);
    void (*message_destroy)(Message *message);
    const char *(*message_errstr)(const Message *message);
    int64_t (*message_timestamp)(const Message *message, int *kind);
    const char *(*topic_name)(const void *topic);
} kafka;

typedef struct {
    char *topic;
    int32_t partition;
} Partition;

typedef struct {
    PyObject_HEAD
    PyObject *consumer;
    void *client;
    void *queue;
    Partition *partitions;
    Py_ssize_t partition_count;
    Message **messages;
    size_t message_capacity;
    int busy; /* a read runs, perhaps without the interpreter's lock */
} Reader;

/* ---- librdkafka, as confluent_kafka has loaded it ---- */

static int
find_function(void **place, const char *name)
{
    *place = dlsym(kafka.library, name);
    if (*place == NULL)
        PyErr_Format(PyExc_RuntimeError, "confluent_kafka's librdkafka has no %s", name);
    return *place != NULL;
}

static int
find_functions(const char *path)
{
    /* Only what is loaded already; its own dependencies are searched, too. */
    kafka.library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (kafka.library == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%s is not loaded: %s", path, dlerror());
        return 0;
    }
#define FIND(field) find_function((void **)&kafka.field, "rd_kafka_" #field)
    if (FIND(version) && FIND(name) && FIND(type) && FIND(queue_new) && FIND(queue_destroy) &&
        FIND(queue_get_partition) && FIND(queue_forward) && FIND(queue_yield) &&
        FIND(consume_batch_queue) && FIND(message_destroy) && FIND(message_errstr) &&
        FIND(message_timestamp) && FIND(topic_name))
        return 1;
#undef FIND
    dlclose(kafka.library);
    kafka.library = NULL;
    return 0;
}

static int
load_functions(PyObject *cimpl)
{
    if (kafka.library != NULL)
        return 1;
    PyObject *file = PyObject_GetAttrString(cimpl, "__file__");
    if (file == NULL)
        return 0;
    PyObject *encoded = NULL;
    int found = PyUnicode_FSConverter(file, &encoded) && find_functions(PyBytes_AsString(encoded));
    Py_XDECREF(encoded);
    Py_DECREF(file);
    if (!found)
        return 0;
    int version = kafka.version();
    if (version < VERSION_MIN || version > VERSION_MAX) {
        PyErr_Format(PyExc_RuntimeError, "librdkafka %x is not known, only 2.x", version);
        kafka.library = NULL;
        return 0;
    }
    return 1;
}

/* ---- the client of a Consumer ---- */

static Py_ssize_t
basic_size_of(PyObject *type)
{
    PyObject *size = PyObject_GetAttrString(type, "__basicsize__");
    if (size == NULL)
        return -1;
    Py_ssize_t known = PyLong_AsSsize_t(size);
    Py_DECREF(size);
    return known;
}

/* Returns the client that `consumer` holds now, NULL once it is closed. */
static void *
client_in(PyObject *consumer)
{
    void *client;
    memcpy(&client, (char *)consumer + sizeof(PyObject), sizeof client);
    return client;
}

static int
check_layout(PyObject *consumer, PyObject *cimpl, Py_ssize_t size_known)
{
    PyObject *type = PyObject_GetAttrString(cimpl, "Consumer");
    if (type == NULL)
        return 0;
    Py_ssize_t size = basic_size_of(type);
    Py_ssize_t head = basic_size_of((PyObject *)&PyBaseObject_Type);
    int is_consumer = PyObject_IsInstance(consumer, type);
    Py_DECREF(type);
    if (size < 0 || head < 0 || is_consumer < 0)
        return 0;
    if (!is_consumer) {
        PyErr_SetString(PyExc_TypeError, "needs a confluent_kafka.Consumer");
        return 0;
    }
    if (size != size_known || head != (Py_ssize_t)sizeof(PyObject)) {
        PyErr_Format(PyExc_RuntimeError,
                     "a Consumer has %zd bytes and an object's head %zd, where %zd and %zd are known",
                     size, head, size_known, (Py_ssize_t)sizeof(PyObject));
        return 0;
    }
    return 1;
}

/* Returns the client of `consumer` if it answers as the consumer named `client_id` would. */
static void *
find_client(PyObject *consumer, const char *client_id)
{
    void *client = client_in(consumer);
    if (client == NULL || (uintptr_t)client % sizeof(void *) != 0) {
        PyErr_SetString(PyExc_RuntimeError, "the Consumer is closed, or holds no client");
        return NULL;
    }
    /* If the layout were another one, this would read foreign memory: hence the check of sizes above,
     * and of the name that the caller has given the client. */
    const char *name = kafka.name(client);
    size_t length = strlen(client_id);
    if (kafka.type(client) != CONSUMER_TYPE || name == NULL ||
        strncmp(name, client_id, length) != 0 || strncmp(name + length, "#consumer", 9) != 0) {
        PyErr_Format(PyExc_RuntimeError, "the client is not the consumer %s", client_id);
        return NULL;
    }
    return client;
}

/* ---- Reader ---- */

static int
reader_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"consumer", "client_id", "consumer_bytes", NULL};
    Reader *self = (Reader *)object;
    PyObject *consumer;
    const char *client_id;
    Py_ssize_t size_known;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Osn", names, &consumer, &client_id,
                                     &size_known))
        return -1;
    /* `__init__` may be called twice, and the first queue would be lost. */
    if (self->consumer != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this reader has a consumer already");
        return -1;
    }
    PyObject *cimpl = PyImport_ImportModule("confluent_kafka.cimpl");
    if (cimpl == NULL)
        return -1;
    void *client = NULL;
    if (check_layout(consumer, cimpl, size_known) && load_functions(cimpl))
        client = find_client(consumer, client_id);
    Py_DECREF(cimpl);
    if (client == NULL)
        return -1;
    void *queue = kafka.queue_new(client);
    if (queue == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "librdkafka makes no queue");
        return -1;
    }
    /* The client lives as long as the Consumer does. */
    Py_INCREF(consumer);
    self->consumer = consumer;
    self->client = client;
    self->queue = queue;
    return 0;
}

static void
drop_queue(Reader *self)
{
    if (self->queue != NULL)
        kafka.queue_destroy(self->queue);
    self->queue = NULL;
    self->client = NULL;
    Py_CLEAR(self->consumer);
}

static void
reader_dealloc(PyObject *object)
{
    Reader *self = (Reader *)object;
    PyTypeObject *type = Py_TYPE(object);
    drop_queue(self);
    for (Py_ssize_t at = 0; at < self->partition_count; at++)
        free(self->partitions[at].topic);
    free(self->partitions);
    free(self->messages);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Whether the reader can be used now; it cannot once it, or its Consumer, is closed. */
static int
require_open(Reader *self)
{
    if (self->busy)
        PyErr_SetString(PyExc_RuntimeError, "another thread reads");
    else if (self->queue == NULL || client_in(self->consumer) != self->client)
        PyErr_SetString(PyExc_RuntimeError, "the reader, or its Consumer, is closed");
    else
        return 1;
    return 0;
}

static PyObject *
reader_take_over(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    const char *topic;
    int partition;
    if (!PyArg_ParseTuple(args, "si", &topic, &partition) || !require_open(self))
        return NULL;
    Partition *grown =
        realloc(self->partitions, (size_t)(self->partition_count + 1) * sizeof *grown);
    if (grown == NULL)
        return PyErr_NoMemory();
    self->partitions = grown;
    char *copy = strdup(topic);
    if (copy == NULL)
        return PyErr_NoMemory();
    void *from = kafka.queue_get_partition(self->client, topic, partition);
    if (from == NULL) {
        free(copy);
        return PyErr_Format(PyExc_RuntimeError, "%s-%d has no queue", topic, partition);
    }
    /* From now on, also as its fetching starts, librdkafka leaves this queue led to ours; as fetching
     * stops, it takes it back. */
    kafka.queue_forward(from, self->queue);
    kafka.queue_destroy(from);
    grown[self->partition_count++] = (Partition){copy, partition};
    Py_RETURN_NONE;
}

static PyObject *
reader_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    Reader *self = (Reader *)object;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread reads");
        return NULL;
    }
    drop_queue(self);
    Py_RETURN_NONE;
}

/* Under the interpreter's lock, as `close` is: the queue cannot go away meanwhile. */
static PyObject *
reader_wake(PyObject *object, PyObject *unused)
{
    (void)unused;
    Reader *self = (Reader *)object;
    if (self->queue != NULL)
        kafka.queue_yield(self->queue);
    Py_RETURN_NONE;
}

/* ---- a read ---- */

typedef struct {
    size_t count;  /* messages, events among them */
    size_t events; /* those that are events */
    size_t value_bytes, key_bytes;
    size_t values, keys; /* those that are not null */
} Found;

/* Takes messages until none waits, or there are `count_max`, or `bytes_max` bytes. */
static Found
take_messages(Reader *self, size_t count_max, size_t bytes_max, int timeout_ms)
{
    Found found = {0};
    /* One at first: nothing is known of how large they are, and a record may have megabytes. */
    size_t step = 1, largest = 1;
    while (found.count < count_max && found.value_bytes + found.key_bytes < bytes_max) {
        if (step > count_max - found.count)
            step = count_max - found.count;
        Message **taken = self->messages + found.count;
        /* Would wait until it has `step` of them: it waits for the first one only. */
        ssize_t got =
            kafka.consume_batch_queue(self->queue, found.count ? 0 : timeout_ms, taken, step);
        if (got <= 0)
            break;
        for (ssize_t at = 0; at < got; at++) {
            Message *message = taken[at];
            if (message->err) {
                found.events++;
                continue;
            }
            size_t value = message->payload ? message->len : 0;
            size_t key = message->key ? message->key_len : 0;
            found.values += message->payload != NULL;
            found.keys += message->key != NULL;
            found.value_bytes += value;
            found.key_bytes += key;
            if (value + key > largest)
                largest = value + key;
        }
        found.count += (size_t)got;
        /* The queue is empty. To wait for more would hold back what is here. */
        if ((size_t)got < step)
            break;
        size_t had = found.value_bytes + found.key_bytes;
        /* As many as would fit if all were as large as the largest so far: too few, rather than too
         * many, for what is taken cannot be put back. */
        step = had < bytes_max ? (bytes_max - had) / largest + 1 : 1;
        if (step > STEP_MAX)
            step = STEP_MAX;
    }
    return found;
}

/* Where the columns of one read are written. */
typedef struct {
    char *values, *keys;
    int32_t *value_ends, *key_ends; /* the first is 0, as in Arrow */
    unsigned char *has_value, *has_key; /* one byte a record; NULL where all have one */
    int32_t *places;                    /* in the order of `take_over` */
    int64_t *offsets, *times;
    signed char *time_kinds;
} Columns;

static int32_t
place_of(Reader *self, const Message *message)
{
    const char *topic = kafka.topic_name(message->rkt);
    for (Py_ssize_t at = 0; at < self->partition_count; at++) {
        Partition *known = &self->partitions[at];
        if (known->partition == message->partition && strcmp(known->topic, topic) == 0)
            return (int32_t)at;
    }
    return -1;
}

/* Whether the text begins as a JSON object does, and ends as one. */
static int
looks_like_object(const char *text, size_t size)
{
    return size >= 2 && text[0] == '{' && text[size - 1] == '}';
}

/* Fills `to` and destroys the records; returns whether each value looks like a JSON object. */
static int
copy_messages(Reader *self, const Found *found, const Columns *to, char separator)
{
    int objects = 1;
    size_t row = 0;
    char *value = to->values, *key = to->keys;
    void *topic = NULL;
    int32_t partition = -1, place = -1;
    to->value_ends[0] = to->key_ends[0] = 0;
    for (size_t at = 0; at < found->count; at++) {
        Message *message = self->messages[at];
        if (message->err)
            continue;
        /* Records come in runs of one partition: the names are compared where a run begins. */
        if (message->rkt != topic || message->partition != partition) {
            topic = message->rkt;
            partition = message->partition;
            place = place_of(self, message);
        }
        if (message->payload != NULL && message->len > 0) {
            memcpy(value, message->payload, message->len);
            objects = objects && looks_like_object(value, message->len);
            value += message->len;
        } else {
            objects = 0;
        }
        /* Between two values, so that a parser of many JSON documents takes them as one text. */
        if (separator)
            *value++ = separator;
        if (message->key != NULL && message->key_len > 0) {
            memcpy(key, message->key, message->key_len);
            key += message->key_len;
        }
        if (to->has_value != NULL)
            to->has_value[row] = message->payload != NULL;
        if (to->has_key != NULL)
            to->has_key[row] = message->key != NULL;
        int kind = 0;
        to->times[row] = kafka.message_timestamp(message, &kind);
        to->time_kinds[row] = (signed char)kind;
        to->places[row] = place;
        to->offsets[row] = message->offset;
        row++;
        to->value_ends[row] = (int32_t)(value - to->values);
        to->key_ends[row] = (int32_t)(key - to->keys);
        /* At once, not at the end: librdkafka frees a fetched batch with its last message, and else
         * the copy and the original of all records would be there together. */
        kafka.message_destroy(message);
        self->messages[at] = NULL;
    }
    return objects;
}

/* The columns of one read as Python objects, each the memory that a field of `Columns` points to. */
typedef struct {
    PyObject *values, *value_ends, *has_value;
    PyObject *keys, *key_ends, *has_key;
    PyObject *places, *offsets, *times, *time_kinds;
} Buffers;

static void
drop_buffers(Buffers *buffers)
{
    Py_CLEAR(buffers->values);
    Py_CLEAR(buffers->value_ends);
    Py_CLEAR(buffers->has_value);
    Py_CLEAR(buffers->keys);
    Py_CLEAR(buffers->key_ends);
    Py_CLEAR(buffers->has_key);
    Py_CLEAR(buffers->places);
    Py_CLEAR(buffers->offsets);
    Py_CLEAR(buffers->times);
    Py_CLEAR(buffers->time_kinds);
}

/* Points `*memory` to the bytes of a new byte string; to none, with None, if it is not wanted. */
static PyObject *
make_buffer(size_t size, int wanted, void *memory)
{
    char *start = NULL;
    PyObject *made;
    if (!wanted) {
        made = Py_None;
        Py_INCREF(made);
    } else {
        made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
        if (made != NULL)
            start = PyBytes_AsString(made);
    }
    memcpy(memory, &start, sizeof start);
    return made;
}

static int
make_buffers(const Found *found, size_t value_bytes, Buffers *buffers, Columns *columns)
{
    size_t rows = found->count - found->events;
    buffers->values = make_buffer(value_bytes, 1, &columns->values);
    buffers->value_ends = make_buffer((rows + 1) * sizeof(int32_t), 1, &columns->value_ends);
    buffers->has_value = make_buffer(rows, found->values < rows, &columns->has_value);
    buffers->keys = make_buffer(found->key_bytes, 1, &columns->keys);
    buffers->key_ends = make_buffer((rows + 1) * sizeof(int32_t), 1, &columns->key_ends);
    buffers->has_key = make_buffer(rows, found->keys < rows, &columns->has_key);
    buffers->places = make_buffer(rows * sizeof(int32_t), 1, &columns->places);
    buffers->offsets = make_buffer(rows * sizeof(int64_t), 1, &columns->offsets);
    buffers->times = make_buffer(rows * sizeof(int64_t), 1, &columns->times);
    buffers->time_kinds = make_buffer(rows, 1, &columns->time_kinds);
    return buffers->values && buffers->value_ends && buffers->has_value && buffers->keys &&
           buffers->key_ends && buffers->has_key && buffers->places && buffers->offsets &&
           buffers->times && buffers->time_kinds;
}

/* Returns [(code, text, topic or None, partition, offset), ...] of the messages that are events. */
static PyObject *
list_events(Reader *self, const Found *found)
{
    PyObject *events = PyList_New(0);
    for (size_t at = 0; events != NULL && found->events && at < found->count; at++) {
        Message *message = self->messages[at];
        if (!message->err)
            continue;
        const char *topic = message->rkt ? kafka.topic_name(message->rkt) : NULL;
        PyObject *event = Py_BuildValue("(isziL)", message->err, kafka.message_errstr(message),
                                        topic, message->partition, (long long)message->offset);
        if (event == NULL || PyList_Append(events, event) < 0)
            Py_CLEAR(events);
        Py_XDECREF(event);
    }
    return events;
}

static void
destroy_messages(Reader *self, const Found *found)
{
    for (size_t at = 0; at < found->count; at++)
        if (self->messages[at] != NULL)
            kafka.message_destroy(self->messages[at]);
}

/* Returns the tuple that `read` returns; the messages are still to be destroyed. */
static PyObject *
make_read(Reader *self, const Found *found, char separator)
{
    size_t rows = found->count - found->events;
    size_t value_bytes = found->value_bytes + (separator ? rows : 0);
    if (value_bytes > INT32_MAX || found->key_bytes > INT32_MAX)
        return PyErr_Format(PyExc_OverflowError, "%zu records have more than 2 GiB", rows);
    PyObject *events = list_events(self, found);
    if (events == NULL)
        return NULL;
    Buffers buffers = {0};
    Columns columns;
    if (!make_buffers(found, value_bytes, &buffers, &columns)) {
        Py_DECREF(events);
        drop_buffers(&buffers);
        return NULL;
    }
    int objects = 0;
    Py_BEGIN_ALLOW_THREADS
    objects = copy_messages(self, found, &columns, separator);
    Py_END_ALLOW_THREADS
    PyObject *read = Py_BuildValue(
        "(nOOOOOOOOOOOO)", (Py_ssize_t)rows, events, buffers.values, buffers.value_ends,
        buffers.has_value, buffers.keys, buffers.key_ends, buffers.has_key, buffers.places,
        buffers.offsets, buffers.times, buffers.time_kinds, objects ? Py_True : Py_False);
    Py_DECREF(events);
    drop_buffers(&buffers);
    return read;
}

static PyObject *
reader_read(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    Py_ssize_t count_max, bytes_max;
    int timeout_ms;
    const char *separator;
    Py_ssize_t separator_bytes;
    if (!PyArg_ParseTuple(args, "nniy#", &count_max, &bytes_max, &timeout_ms, &separator,
                          &separator_bytes))
        return NULL;
    if (count_max < 1 || count_max > 1000000 || bytes_max < 1 || bytes_max > INT_MAX ||
        timeout_ms < 0 || separator_bytes > 1) {
        PyErr_SetString(PyExc_ValueError, "count_max, bytes_max, timeout_ms or separator is out of range");
        return NULL;
    }
    if (!require_open(self))
        return NULL;
    if (self->message_capacity < (size_t)count_max) {
        Message **grown = realloc(self->messages, (size_t)count_max * sizeof *grown);
        if (grown == NULL)
            return PyErr_NoMemory();
        self->messages = grown;
        self->message_capacity = (size_t)count_max;
    }
    /* Before the interpreter's lock is released: another thread may call `read` or `close` then. */
    self->busy = 1;
    Found found;
    Py_BEGIN_ALLOW_THREADS
    found = take_messages(self, (size_t)count_max, (size_t)bytes_max, timeout_ms);
    Py_END_ALLOW_THREADS
    /* With the lock: it makes Python objects. Records that did not fit are destroyed below. */
    PyObject *read = make_read(self, &found, separator_bytes ? separator[0] : 0);
    destroy_messages(self, &found);
    self->busy = 0;
    return read;
}

/* ---- JSON ---- */

#define JSON_COLUMNS_MAX 64
/* A number with more digits may not fit in 64 bits. */
#define JSON_DIGITS_MAX 18

/* A column that is filled from JSON: the parameters, and where its values are written. */
typedef struct {
    const char *name;
    size_t name_bytes;
    char kind; /* i: int32, q: int64, s: text */
    int is_nullable;
    PyObject *number_buffer, *validity_buffer; /* owned */
    char *numbers;           /* NULL for text */
    unsigned char *validity; /* NULL if the column is not nullable */
    size_t null_count;
    int32_t *starts, *ends; /* of each text, in the JSON; NULL for numbers */
} JsonColumn;

/* No line feed: it stands only between two records, and so the records are counted by them. */
static const char *
skip_spaces(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

/* Returns the closing quote of the text that begins at `at`; NULL if it holds an escape sequence, a
 * control character, or no end. */
static const char *
find_quote(const char *at, const char *end, int *is_ascii)
{
    for (; at < end; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte == '"')
            return at;
        if (byte == '\\' || byte < 0x20)
            return NULL;
        if (byte >= 0x80)
            *is_ascii = 0;
    }
    return NULL;
}

/* Returns what follows the integer at `at`; NULL if there is none, or one that is written oddly. */
static const char *
read_integer(const char *at, const char *end, int64_t *value)
{
    int is_negative = at < end && *at == '-';
    at += is_negative;
    const char *digits = at;
    int64_t read = 0;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        if (at - digits == JSON_DIGITS_MAX)
            return NULL;
        read = read * 10 + (*at - '0');
    }
    if (at == digits || (*digits == '0' && (is_negative || at - digits > 1)))
        return NULL;
    *value = is_negative ? -read : read;
    return at;
}

static const char *
skip_word(const char *at, const char *end, const char *word)
{
    size_t size = strlen(word);
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

/* Returns what follows a value of no column: ASCII text, an integer, true, false or null. */
static const char *
skip_value(const char *at, const char *end)
{
    int64_t ignored;
    int is_ascii = 1;
    if (at >= end)
        return NULL;
    switch (*at) {
    case '"':
        at = find_quote(at + 1, end, &is_ascii);
        return at != NULL && is_ascii ? at + 1 : NULL;
    case 't':
        return skip_word(at, end, "true");
    case 'f':
        return skip_word(at, end, "false");
    case 'n':
        return skip_word(at, end, "null");
    default:
        return read_integer(at, end, &ignored);
    }
}

static void
write_number(JsonColumn *column, size_t row, int64_t value)
{
    int32_t narrow = (int32_t)value;
    if (column->kind == 'q')
        memcpy(column->numbers + row * sizeof value, &value, sizeof value);
    else
        memcpy(column->numbers + row * sizeof narrow, &narrow, sizeof narrow);
}

static void
write_null(JsonColumn *column, size_t row)
{
    column->validity[row / 8] &= (unsigned char)~(1u << (row % 8));
    column->null_count++;
    if (column->kind == 's')
        column->starts[row] = column->ends[row] = 0;
    else
        write_number(column, row, 0);
}

/* Writes the value at `at`; returns what follows it, NULL if it is not one for this column. */
static const char *
read_value(JsonColumn *column, size_t row, const char *text, const char *at, const char *end,
           int *is_ascii)
{
    if (at < end && *at == 'n' && column->is_nullable) {
        at = skip_word(at, end, "null");
        if (at != NULL)
            write_null(column, row);
        return at;
    }
    if (column->kind == 's') {
        if (at >= end || *at != '"')
            return NULL;
        const char *quote = find_quote(at + 1, end, is_ascii);
        if (quote == NULL)
            return NULL;
        column->starts[row] = (int32_t)(at + 1 - text);
        column->ends[row] = (int32_t)(quote - text);
        return quote + 1;
    }
    int64_t value;
    at = read_integer(at, end, &value);
    if (at == NULL || (column->kind == 'i' && (value < INT32_MIN || value > INT32_MAX)))
        return NULL;
    write_number(column, row, value);
    return at;
}

/* Returns the column of that name, `count` if there is none; looks at `first` first. */
static size_t
find_column(const JsonColumn *columns, size_t count, size_t first, const char *name, size_t bytes)
{
    for (size_t step = 0; step < count; step++) {
        size_t at = first + step < count ? first + step : first + step - count;
        if (columns[at].name_bytes == bytes && memcmp(columns[at].name, name, bytes) == 0)
            return at;
    }
    return count;
}

/* Reads the record at `at`; returns what follows it, NULL if it is not one of the plain form. */
static const char *
read_record(JsonColumn *columns, size_t count, size_t row, const char *text, const char *at,
            const char *end, int *is_ascii)
{
    uint64_t seen = 0;
    size_t expected = 0, seen_count = 0;
    if (at >= end || *at != '{')
        return NULL;
    at = skip_spaces(at + 1, end);
    for (int is_first = 1; at < end && *at != '}'; is_first = 0) {
        if (!is_first) {
            if (*at != ',')
                return NULL;
            at = skip_spaces(at + 1, end);
        }
        int is_ascii_name = 1;
        if (at >= end || *at != '"')
            return NULL;
        const char *name = at + 1;
        const char *quote = find_quote(name, end, &is_ascii_name);
        if (quote == NULL || !is_ascii_name)
            return NULL;
        at = skip_spaces(quote + 1, end);
        if (at >= end || *at != ':')
            return NULL;
        at = skip_spaces(at + 1, end);
        size_t column = find_column(columns, count, expected, name, (size_t)(quote - name));
        if (column == count) {
            at = skip_value(at, end);
        } else {
            /* Of a name that comes twice, the other reader decides which value it has. */
            if (seen >> column & 1)
                return NULL;
            seen |= (uint64_t)1 << column;
            seen_count++;
            /* Most records have their fields in one order. */
            expected = column + 1 < count ? column + 1 : 0;
            at = read_value(&columns[column], row, text, at, end, is_ascii);
        }
        if (at == NULL)
            return NULL;
        at = skip_spaces(at, end);
    }
    for (size_t column = 0; seen_count < count && column < count; column++) {
        if (seen >> column & 1)
            continue;
        if (!columns[column].is_nullable)
            return NULL;
        write_null(&columns[column], row);
    }
    return at < end ? at + 1 : NULL;
}

/* Whether `text` is `rows` records of the plain form, a line feed behind each. */
static int
read_records(JsonColumn *columns, size_t count, size_t rows, const char *text, size_t text_bytes,
             int *is_ascii)
{
    const char *at = text, *end = text + text_bytes;
    for (size_t row = 0; row < rows; row++) {
        at = read_record(columns, count, row, text, at, end, is_ascii);
        if (at == NULL || at >= end || *at != '\n')
            return 0;
        at++;
    }
    return at == end;
}

static void
drop_json_columns(JsonColumn *columns, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        Py_CLEAR(columns[at].number_buffer);
        Py_CLEAR(columns[at].validity_buffer);
        free(columns[at].starts);
        free(columns[at].ends);
    }
}

/* Makes room for `rows` values; returns 0 with an exception if that fails. */
static int
open_json_column(JsonColumn *column, PyObject *name, char kind, int is_nullable, size_t rows)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(name, &bytes, &size) < 0)
        return 0;
    column->name = bytes;
    column->name_bytes = (size_t)size;
    column->kind = kind;
    column->is_nullable = is_nullable;
    column->validity_buffer = make_buffer((rows + 7) / 8, is_nullable, &column->validity);
    if (column->validity_buffer == NULL)
        return 0;
    if (is_nullable)
        memset(column->validity, 0xff, (rows + 7) / 8);
    if (kind == 's') {
        column->starts = malloc((rows + 1) * sizeof *column->starts);
        column->ends = malloc((rows + 1) * sizeof *column->ends);
        if (column->starts == NULL || column->ends == NULL)
            PyErr_NoMemory();
        return column->starts != NULL && column->ends != NULL;
    }
    if (kind != 'q' && kind != 'i') {
        PyErr_SetString(PyExc_ValueError, "a column is neither i, q nor s");
        return 0;
    }
    size_t width = kind == 'q' ? sizeof(int64_t) : sizeof(int32_t);
    column->number_buffer = make_buffer(rows * width, 1, &column->numbers);
    return column->number_buffer != NULL;
}

/* Returns (null count, validity or None, numbers), or (null count, validity, offsets, text). */
static PyObject *
list_buffers(const JsonColumn *column, size_t rows, const char *text)
{
    PyObject *validity = column->null_count ? column->validity_buffer : Py_None;
    Py_ssize_t null_count = (Py_ssize_t)column->null_count;
    if (column->kind != 's')
        return Py_BuildValue("(nOO)", null_count, validity, column->number_buffer);
    size_t text_bytes = 0;
    for (size_t row = 0; row < rows; row++)
        text_bytes += (size_t)(column->ends[row] - column->starts[row]);
    int32_t *offsets;
    char *copied;
    PyObject *offset_buffer = make_buffer((rows + 1) * sizeof *offsets, 1, &offsets);
    PyObject *text_buffer = make_buffer(text_bytes, 1, &copied);
    PyObject *listed = NULL;
    if (offset_buffer != NULL && text_buffer != NULL) {
        int32_t offset = 0;
        for (size_t row = 0; row < rows; row++) {
            int32_t size = column->ends[row] - column->starts[row];
            offsets[row] = offset;
            memcpy(copied + offset, text + column->starts[row], (size_t)size);
            offset += size;
        }
        offsets[rows] = offset;
        listed = Py_BuildValue("(nOOO)", null_count, validity, offset_buffer, text_buffer);
    }
    Py_XDECREF(offset_buffer);
    Py_XDECREF(text_buffer);
    return listed;
}

static PyObject *
list_columns(const JsonColumn *columns, size_t count, size_t rows, const char *text, int is_ascii)
{
    PyObject *listed = PyList_New(0);
    for (size_t at = 0; listed != NULL && at < count; at++) {
        PyObject *buffers = list_buffers(&columns[at], rows, text);
        if (buffers == NULL || PyList_Append(listed, buffers) < 0)
            Py_CLEAR(listed);
        Py_XDECREF(buffers);
    }
    return listed == NULL ? NULL : Py_BuildValue("(ON)", is_ascii ? Py_True : Py_False, listed);
}

static PyObject *
decode_json(PyObject *module, PyObject *args)
{
    (void)module;
    const char *text, *kinds, *nullable;
    Py_ssize_t text_bytes, kinds_count, nullable_count, rows;
    PyObject *names;
    if (!PyArg_ParseTuple(args, "y#nO!y#y#", &text, &text_bytes, &rows, &PyTuple_Type, &names,
                          &kinds, &kinds_count, &nullable, &nullable_count))
        return NULL;
    if (kinds_count < 1 || kinds_count > JSON_COLUMNS_MAX || kinds_count != nullable_count ||
        kinds_count != PyTuple_Size(names) || rows < 0 || rows > text_bytes ||
        text_bytes > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "text, count or columns are out of range");
        return NULL;
    }
    JsonColumn columns[JSON_COLUMNS_MAX] = {0};
    size_t count = (size_t)kinds_count;
    PyObject *decoded = NULL;
    for (size_t at = 0; at < count; at++)
        if (!open_json_column(&columns[at], PyTuple_GetItem(names, (Py_ssize_t)at), kinds[at],
                              nullable[at] != 0, (size_t)rows))
            goto done;
    int is_plain, is_ascii = 1;
    /* The caller's arguments hold the text and the names meanwhile. */
    Py_BEGIN_ALLOW_THREADS
    is_plain = read_records(columns, count, (size_t)rows, text, (size_t)text_bytes, &is_ascii);
    Py_END_ALLOW_THREADS
    if (is_plain) {
        decoded = list_columns(columns, count, (size_t)rows, text, is_ascii);
    } else {
        decoded = Py_None;
        Py_INCREF(decoded);
    }
done:
    drop_json_columns(columns, count);
    return decoded;
}

/* ---- the module ---- */

static PyMethodDef module_methods[] = {
    {"decode_json", decode_json, METH_VARARGS,
     "decode_json(text, count, names, kinds, nullable): read `count` JSON objects, a line feed\n"
     "behind each, into columns: (whether all text is ASCII, the buffers of each column). None if\n"
     "one of them is not of the plain form: any other decoder has to say what it is."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef reader_methods[] = {
    {"take_over", reader_take_over, METH_VARARGS,
     "take_over(topic, partition): have its records come to `read`, and no longer to the Consumer.\n"
     "To be called before the partition is assigned."},
    {"read", reader_read, METH_VARARGS,
     "read(count_max, bytes_max, timeout_ms, separator): wait for the first record, and return it\n"
     "with those that wait behind it."},
    {"wake", reader_wake, METH_NOARGS,
     "wake(): have the `read` that waits return at once, or the next one that would wait. From any\n"
     "thread; does nothing once the reader is closed."},
    {"close", reader_close, METH_NOARGS,
     "close(): give the queue back; to be called before the Consumer's own `close`."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Reader(consumer, client_id, consumer_bytes): reads records of `consumer`."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, reader_init},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "onceflow_kafka_native.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reader_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *reader = PyType_FromSpec(&reader_spec);
    if (reader == NULL)
        return -1;
    if (PyModule_AddObject(module, "Reader", reader) < 0) {
        Py_DECREF(reader);
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "onceflow_kafka_native",
    .m_doc = "Reads Kafka records without a Python object a record.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit_onceflow_kafka_native(void)
{
    return PyModuleDef_Init(&module_definition);
}
