// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Settings reads Config.Extra and keeps the errors for the end.
type Settings struct {
	Extra map[string]string
	host  *Host
	errs  []error
}

// Settings starts to read the settings of the host.
func (h *Host) Settings() *Settings { return &Settings{Extra: h.Extra, host: h} }

// Fail notes an error.
func (s *Settings) Fail(err error) { s.errs = append(s.errs, err) }

// Err joins the errors of all settings that were read.
func (s *Settings) Err() error { return errors.Join(s.errs...) }

// number reads a number of 0 or more.
func (s *Settings) number(name string, otherwise float64) float64 {
	text := s.Extra[name]
	if text == "" {
		return otherwise
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v < 0 {
		s.Fail(fmt.Errorf("setting %s of Extra is not a number of 0 or more", name))
	}
	return v
}

// Seconds reads a number of seconds.
func (s *Settings) Seconds(name string, otherwise float64) time.Duration {
	return time.Duration(s.number(name, otherwise) * float64(time.Second))
}

// Count reads a whole number of 0 or more.
func (s *Settings) Count(name string, otherwise int) int {
	return int(s.number(name, float64(otherwise)))
}

// Duration reads a duration as Go writes it; 0 when it is not set.
func (s *Settings) Duration(name string) time.Duration {
	d, err := time.ParseDuration(s.Extra[name])
	if err != nil && s.Extra[name] != "" {
		s.Fail(fmt.Errorf("setting %s of Extra is not a duration", name))
	}
	return d
}
