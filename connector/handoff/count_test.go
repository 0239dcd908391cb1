// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCount(t *testing.T) {
	for _, k := range []struct {
		raw   string
		depth int
		n     int
		ok    bool
	}{
		{"[1,2]", 1, 2, true}, {" [ 0 ,\n9223372036854775807\t] ", 1, 2, true}, {"[]", 1, 0, true},
		{"[[1,2],[3],[]]", 2, 3, true}, {"[]", 2, 0, true}, {"[[[1]]]", 3, 1, true},
		{"[[1]]", 1, 0, false}, {"[1]", 2, 0, false}, {"[9223372036854775808]", 1, 0, false}, {"[01]", 1, 0, false},
		{"[-1]", 1, 0, false},
		{"[1.0]", 1, 0, false}, {"[1e2]", 1, 0, false}, {"[1,]", 1, 0, false}, {"[1 2]", 1, 0, false},
		{"[1]]", 1, 0, false}, {"[1", 1, 0, false},
		{"", 1, 0, false}, {"null", 1, 0, false}, {`["1"]`, 1, 0, false}, {"[null]", 1, 0, false},
		{"[1]\x00", 1, 0, false}, {"[1,,2]", 1, 0, false}, {"[,1]", 1, 0, false}, {"[00,1]", 1, 0, false},
		{"[1,02,3]", 1, 0, false}, {"[999999999999999999,9223372036854775807,1]", 1, 3, true},
		{"[9223372036854775808,1]", 1, 0, false}, {"[1,2 ,3, 4]", 1, 4, true}, {"[1,2", 1, 0, false},
		{"[1]", 0, 0, false}, {"[[[[[1]]]]]", 5, 0, false},
	} {
		n, ok := count([]byte(k.raw), k.depth)
		assert.Equal(t, k.ok, ok, "%q at %d", k.raw, k.depth)
		if k.ok {
			assert.Equal(t, k.n, n, "%q at %d", k.raw, k.depth)
		}
	}
}

func TestTokenIDs(t *testing.T) {
	for list, good := range map[string]bool{"[1]": true, "[0, 1 ,\n2 ]": true, "[ 1 , 20,0 ]": true, "[]": false,
		"[ ]": false, "[01]": false, "[1e3]": false, "[[1]]": false, `["1"]`: false, "{}": false, "7": false} {
		assert.Equal(t, good, TokenIDs([]byte(list)), list)
	}
}

// count accepts exactly what a slow and simple reader accepts.
func FuzzCount(f *testing.F) {
	for _, seed := range []string{"[[1,2],[3]]", "[[]]", "[]", "[[1],]", "[[01]]", " [ [ 1 ] ] ",
		"[[9223372036854775808]]", "[[-1]]", "[[1.0]]", "[[\n1\t,\r2]]", "[[9223372036854775807]]", "[[1e2]]",
		"[[1,]]", "[[1] [2]]", "[[1]]]", "[[[1]]]", "[null,[1]]", `[["1"]]`, "[[1}]"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		n, ok := count([]byte(raw), 2)
		want, wantOK := slow(raw)
		require.Equal(t, wantOK, ok, "%q", raw)
		if ok {
			require.Equal(t, want, n, "%q", raw)
		}
	})
}

func slow(raw string) (n int, ok bool) {
	var groups []json.RawMessage
	if json.Unmarshal([]byte(raw), &groups) != nil || groups == nil {
		return 0, false
	}
	for _, g := range groups {
		var ids []json.RawMessage
		if json.Unmarshal(g, &ids) != nil || ids == nil {
			return 0, false
		}
		for _, id := range ids {
			if v, err := strconv.ParseInt(string(id), 10, 64); err != nil || v < 0 || id[0] == '-' {
				return 0, false
			}
			n++
		}
	}
	return n, true
}

// BenchmarkCount is the handoff of a prompt of 1 MB.
func BenchmarkCount(b *testing.B) {
	raw := []byte("[[")
	for id := range 16384 {
		raw = strconv.AppendInt(append(raw, ','), int64(10000+id), 10)
	}
	raw = append(append(raw[:2], raw[3:]...), "]]"...)
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if n, ok := count(raw, 2); !ok || n != 16384 {
			b.Fatal(n, ok)
		}
	}
}
