// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"

	"github.com/pdkit/pdkit/pdflow/decide/record"
)

type replayCmd struct {
	Files  []string `arg:"" name:"file" help:"${replay_files}"`
	Verify bool     `help:"${replay_verify}"`
	JSON   bool     `name:"json" help:"Write the result as JSON."`

	whatIf
}

// verified is the result of a file.
type verified struct {
	File      string                 `json:"file"`
	Header    record.Header          `json:"header"`
	Decisions int                    `json:"decisions"`
	Alike     int                    `json:"alike"`
	Problems  map[record.Problem]int `json:"problems,omitempty"` // lines that could not be read
	First     string                 `json:"firstDifference,omitempty"`
}

// Run verifies the files, or plays them with another set-up.
func (c *replayCmd) Run(s streams) error {
	switch asked := c.asked(); {
	case c.Verify == asked:
		return errors.New("say what to do with the decisions: --verify, or another set-up, as --policy or --decode")
	case asked:
		return c.answer(c.Files, c.JSON, s)
	}
	all := make([]verified, 0, len(c.Files))
	decisions, alike := 0, 0
	for _, name := range c.Files {
		v, err := verifyFile(name, s.in)
		if errors.Is(err, record.ErrEmpty) {
			tellEmpty(name, s)
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, v)
		decisions, alike = decisions+v.Decisions, alike+v.Alike
		if !c.JSON {
			v.print(s.out)
		}
	}
	if c.JSON {
		if err := writeJSON(s.out, all); err != nil {
			return err
		}
	}
	switch {
	case decisions == 0:
		return errors.New("there is no decision that could be read")
	case alike < decisions:
		return errFaults
	}
	return nil
}

func verifyFile(name string, in io.Reader) (verified, error) {
	from, err := opened(name, in)
	if err != nil {
		return verified{}, err
	}
	defer from.Close()
	r, err := record.Verify(from)
	if err != nil {
		return verified{}, err
	}
	v := verified{File: name, Header: r.Header, Decisions: r.Read, Alike: r.Alike, Problems: r.Problems}
	if r.First != nil {
		v.First = r.First.String()
	}
	return v, nil
}

// opened opens a file; - is the standard input. The error does not have its name.
func opened(name string, in io.Reader) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(in), nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	return f, nil
}

func tellEmpty(name string, s streams) {
	fmt.Fprintf(s.err, "pdctl: %s is not read: %v\n", name, record.ErrEmpty)
}

func printProblems(out io.Writer, before string, all map[record.Problem]int) {
	for _, problem := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(out, "%snot read: %d × a line that is %s\n", before, all[problem], problem)
	}
}

func (v *verified) print(out io.Writer) {
	h := &v.Header
	fmt.Fprintf(out, "%s: model %s, mode %s, %g of conversations from %s\n", v.File, h.Model, h.Policy.Mode, h.Share,
		h.Began.UTC().Format("2006-01-02T15:04:05Z"))
	printProblems(out, "  ", v.Problems)
	if v.Decisions == 0 {
		return
	}
	share := 100 * float64(v.Alike) / float64(v.Decisions)
	if v.Alike < v.Decisions {
		share = min(share, 99.99)
	}
	fmt.Fprintf(out, "  %d of %d decisions are alike: %.4g %%\n", v.Alike, v.Decisions, share)
	if v.First == "" {
		return
	}
	fmt.Fprintf(out, "  The first difference: %s\n", v.First)
	if h.Arch != runtime.GOARCH {
		fmt.Fprintf(out, "  The file is of %s, and this program of %s: their floating point numbers may differ in the "+
			"last digit.\n", h.Arch, runtime.GOARCH)
	}
}
