// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// settings reads Config.Extra and keeps the errors for the end.
type settings struct {
	extra map[string]string
	errs  []error
}

func (h *host) settings() *settings { return &settings{extra: h.extra} }

// fail notes an error.
func (s *settings) fail(err error) { s.errs = append(s.errs, err) }

// err joins the errors of all settings that were read.
func (s *settings) err() error { return errors.Join(s.errs...) }

// number reads a number of 0 or more.
func (s *settings) number(name string, otherwise float64) float64 {
	text := s.extra[name]
	if text == "" {
		return otherwise
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v < 0 {
		s.fail(fmt.Errorf("setting %s of Extra is not a number of 0 or more", name))
	}
	return v
}

// seconds reads a number of seconds.
func (s *settings) seconds(name string, otherwise float64) time.Duration {
	return time.Duration(s.number(name, otherwise) * float64(time.Second))
}

// count reads a whole number of 0 or more.
func (s *settings) count(name string, otherwise int) int {
	return int(s.number(name, float64(otherwise)))
}

// duration reads a duration as Go writes it; 0 when it is not set.
func (s *settings) duration(name string) time.Duration {
	d, err := time.ParseDuration(s.extra[name])
	if err != nil && s.extra[name] != "" {
		s.fail(fmt.Errorf("setting %s of Extra is not a duration", name))
	}
	return d
}
