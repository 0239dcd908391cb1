// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/internal/reread"
)

// digests are those of the tokens, so that comparing takes the same time for tokens of any length.
type digests [][sha256.Size]byte

// readTokens returns the tokens that are good now. nil stands for: no token is required.
func readTokens(token, file string) (func() digests, error) {
	var fixed digests
	if token != "" {
		fixed = digests{sha256.Sum256([]byte(token))}
	}
	if file == "" {
		if fixed == nil {
			return nil, nil
		}
		return func() digests { return fixed }, nil
	}
	files, err := reread.Open(func(contents [][]byte) (digests, error) {
		all := slices.Clip(fixed)
		for line := range bytes.Lines(contents[0]) {
			if line = bytes.TrimSpace(line); len(line) > 0 {
				all = append(all, sha256.Sum256(line))
			}
		}
		if len(all) == len(fixed) {
			return nil, fmt.Errorf("token file %s: %w", file, errNoToken)
		}
		return all, nil
	}, reread.File{What: "token file", Path: file})
	if err != nil {
		return nil, fmt.Errorf("registration: %w", err)
	}
	return files.Get, nil
}

var errNoToken = errors.New("has no token")

// allow reports whether a request's Authorization has one of the tokens. It compares all of them, in constant time.
func (d digests) allow(authorization string) bool {
	scheme, token, _ := strings.Cut(authorization, " ")
	sum := sha256.Sum256([]byte(strings.TrimSpace(token)))
	equal := 0
	for i := range d {
		equal |= subtle.ConstantTimeCompare(sum[:], d[i][:])
	}
	return equal == 1 && strings.EqualFold(scheme, "Bearer")
}
