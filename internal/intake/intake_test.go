// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"bytes"
	"io"
	"net/http"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOnlyPlainJSONMayComeIn(t *testing.T) {
	for _, good := range []string{"application/json", "Application/JSON; charset=utf-8", "application/json; charset"} {
		assert.Nil(t, CheckJSON(http.Header{"Content-Type": {good}}), good)
	}
	for _, bad := range [][]string{nil, {""}, {"text/plain"}, {"application/json", "application/json"},
		{"application/jsonl"}, {"multipart/form-data; boundary=x"}} {
		fault := CheckJSON(http.Header{"Content-Type": bad})
		require.NotNil(t, fault, bad)
		assert.Contains(t, fault.Message, "Content-Type", bad)
	}
	for encoding, fault := range map[string]bool{"": false, "Identity": false, "gzip": true, "identity, gzip": true} {
		h := http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {encoding}}
		assert.Equal(t, fault, CheckJSON(h) != nil, encoding)
	}
}

// endless announces more than it sends.
type endless struct{ left int }

func (e *endless) Read(p []byte) (int, error) {
	n := min(len(p), e.left, 4096)
	if e.left -= n; n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// A body costs little more than its bytes, and one that does not come costs little.
func TestWhatABodyCosts(t *testing.T) {
	cost := func(length, comes int) (got int, bytes uint64, err error) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		b, err := ReadAll(&endless{comes}, int64(length), 64<<20, nil)
		runtime.ReadMemStats(&after)
		return len(b), after.TotalAlloc - before.TotalAlloc, err
	}
	for _, size := range []int{0, 1, 1 << 20, 1<<20 + 1, 20 << 20, 64 << 20} {
		got, took, err := cost(size, size)
		require.NoError(t, err, size)
		assert.Equal(t, size, got)
		assert.LessOrEqual(t, took, uint64(size)+uint64(size)/6+(2<<20), "%d bytes", size)
	}
	got, took, err := cost(64<<20, 5000)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	assert.Equal(t, 5000, got)
	assert.Less(t, took, uint64(2<<20))

	_, err = ReadAll(bytes.NewReader(make([]byte, 11)), 11, 10, nil)
	require.ErrorIs(t, err, ErrTooLarge)
	_, err = ReadAll(bytes.NewReader(make([]byte, 11)), -1, 10, nil)
	require.ErrorIs(t, err, ErrTooLarge)
	b, err := ReadAll(bytes.NewReader(make([]byte, 10)), -1, 10, nil)
	require.NoError(t, err)
	assert.Len(t, b, 10)
	_, err = ReadAll(bytes.NewReader(nil), 5, 10, nil)
	require.Error(t, err)
}
