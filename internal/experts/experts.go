// SPDX-License-Identifier: Apache-2.0

// Package experts puts together which experts of a model two engines chose for the tokens of one request.
//
// vLLM with --enable-return-routed-experts returns them for each choice as the base64 text of a NumPy file (.npy): an
// array with a row for each token but the last, of layers times experts (vLLM 0.32.0,
// vllm/entrypoints/openai/completion/protocol.py, vllm/utils/serial_utils.py: numpy2base64). P computes the rows of the
// prompt. D does not, and what stands in its rows of the prompt is what its memory held before.
package experts

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"regexp"
	"strconv"
	"strings"
)

// errForm is the error of arrays that do not fit together. It holds no values.
var errForm = errors.New("experts: the engines' arrays do not fit together")

// Merge returns D's array with P's rows in place of its first ones, which are as many. output is how many rows there
// must be behind them at least: those of the tokens that D has made and computed. A P of some models leaves D the end
// of the prompt.
func Merge(prefill, decode string, output int) (string, error) {
	p, err := read(prefill)
	if err != nil {
		return "", err
	}
	d, err := read(decode)
	if err != nil {
		return "", err
	}
	if p.row != d.row || p.kind != d.kind || p.rows > d.rows || d.rows-p.rows < output {
		return "", errForm
	}
	copy(d.data, p.data)
	return base64.StdEncoding.EncodeToString(d.file), nil
}

// array is a NumPy file.
type array struct {
	file []byte
	data []byte // the end of file
	kind string // type of the numbers, as NumPy writes it
	row  string // the shape of one row
	rows int
}

// header is what NumPy writes before the numbers.
var header = regexp.MustCompile(
	`^\{'descr': '([|<>]?[ui][1248])', 'fortran_order': False, 'shape': \((\d{1,9}), ([\d, ]*)\), \}\s*$`)

func read(text string) (a array, err error) {
	if a.file, err = base64.StdEncoding.DecodeString(text); err != nil {
		return a, errForm
	}
	const magic = "\x93NUMPY"
	b := a.file
	if len(b) < len(magic)+6 || !bytes.HasPrefix(b, []byte(magic)) {
		return a, errForm
	}
	length, at := int(binary.LittleEndian.Uint16(b[8:])), 10 // version 1
	if b[6] > 1 {
		n := binary.LittleEndian.Uint32(b[8:])
		if n > uint32(len(b)) {
			return a, errForm
		}
		length, at = int(n), 12
	}
	if length > len(b)-at {
		return a, errForm
	}
	m := header.FindSubmatch(b[at : at+length])
	if m == nil {
		return a, errForm
	}
	a.data, a.kind, a.row = b[at+length:], string(m[1]), string(m[3])
	a.rows, _ = strconv.Atoi(string(m[2]))
	size := int(a.kind[len(a.kind)-1] - '0')
	for n := range strings.SplitSeq(strings.TrimSuffix(a.row, ","), ",") {
		v, err := strconv.Atoi(strings.TrimSpace(n))
		if err != nil || v < 1 || v > 1<<16 {
			return a, errForm
		}
		if size *= v; size > 1<<24 {
			return a, errForm
		}
	}
	if a.rows*size != len(a.data) {
		return a, errForm
	}
	return a, nil
}
