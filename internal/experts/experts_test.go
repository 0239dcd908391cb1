// SPDX-License-Identifier: Apache-2.0

package experts_test

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/experts"
)

// npy is a NumPy file as numpy.save writes it, of rows of two layers with two experts of one byte each.
func npy(kind, row string, rows int, data string) string {
	head := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%d, %s), }", kind, rows, row)
	head += strings.Repeat(" ", 63-(10+len(head))%64) + "\n"
	file := append([]byte("\x93NUMPY\x01\x00"), binary.LittleEndian.AppendUint16(nil, uint16(len(head)))...)
	return base64.StdEncoding.EncodeToString(append(append(file, head...), data...))
}

func TestMerge(t *testing.T) {
	p, d := npy("|u1", "2, 2", 2, "aaaabbbb"), npy("|u1", "2, 2", 4, "????????ccccdddd")
	got, err := experts.Merge(p, d, 2)
	require.NoError(t, err)
	assert.Equal(t, npy("|u1", "2, 2", 4, "aaaabbbbccccdddd"), got)
	got, err = experts.Merge(p, d, 0)
	require.NoError(t, err)
	assert.Equal(t, npy("|u1", "2, 2", 4, "aaaabbbbccccdddd"), got)
	for name, k := range map[string]struct {
		p, d   string
		output int
	}{
		"fewer rows of D's own": {p, d, 3},
		"fewer rows than P's":   {d, p, 0},
		"another type":          {p, npy("<u2", "2, 1", 4, "????????ccccdddd"), 2},
		"another model":         {p, npy("|u1", "4, 1", 4, "????????ccccdddd"), 2},
		"cut":                   {p, npy("|u1", "2, 2", 4, "????????ccccddd"), 2},
		"no base64":             {p, "?", 2},
		"no NumPy file":         {base64.StdEncoding.EncodeToString([]byte("\x93NUMPX\x01\x00 and more")), d, 2},
		"a huge shape":          {p, npy("|u1", "65536, 65536, 65536, 65536", 999999999, ""), 2},
		"no shape":              {p, npy("|u1", "", 4, "????????ccccdddd"), 2},
		"nothing":               {"", "", 0},
	} {
		_, err := experts.Merge(k.p, k.d, k.output)
		assert.Error(t, err, name)
	}
}

func FuzzMerge(f *testing.F) {
	p, d := npy("|u1", "2, 2", 2, "aaaabbbb"), npy("|u1", "2, 2", 4, "????????ccccdddd")
	f.Add(p, d, 2)
	f.Add(d, p, 0)
	f.Add("", "x", 0)
	f.Fuzz(func(t *testing.T, p, d string, output int) {
		if got, err := experts.Merge(p, d, output); err == nil {
			require.Len(t, got, len(d))
		}
	})
}
