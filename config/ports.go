// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

// Ports are ports of one host, in the order in which they are written: a list of numbers and of ranges from the first
// to the last, [8000, 8001] or ["8000-8007"] (in YAML [8000-8007]). Each port is given once.
type Ports []int

// maxPorts bounds a list. No host has engines at more ports.
const maxPorts = 1024

const portsRemedy = "write ports from 1 to 65535, each once, and at most 1024: [8000, 8001] or [8000-8007]"

// ParsePorts reads a list in which commas separate the numbers and ranges: 8000-8007 or 8000,8001. The error is a
// *[FieldError] without a path.
func ParsePorts(text string) (Ports, error) {
	var list Ports
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(strings.TrimSpace(part), "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.ParseUint(strings.TrimSpace(from), 10, 16)
		last, err2 := strconv.ParseUint(strings.TrimSpace(to), 10, 16)
		if err1 != nil || err2 != nil || first < 1 || last < first || last-first >= maxPorts {
			return nil, &FieldError{Problem: "is not a list of ports", Remedy: portsRemedy}
		}
		for port := int(first); port <= int(last); port++ {
			if len(list) == maxPorts || slices.Contains(list, port) {
				return nil, &FieldError{Problem: "has a port twice, or too many", Remedy: portsRemedy}
			}
			list = append(list, port)
		}
	}
	return list, nil
}

// UnmarshalJSON reads a list. The error is a *[FieldError] without a path.
func (p *Ports) UnmarshalJSON(raw []byte) error {
	if kindOf(raw) == "null" {
		return nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return &FieldError{Problem: "is not a list of ports", Remedy: portsRemedy}
	}
	parts := make([]string, len(list))
	for i, part := range list {
		if json.Unmarshal(part, &parts[i]) != nil { // a number
			parts[i] = string(part)
		}
	}
	ports, err := ParsePorts(strings.Join(parts, ","))
	if err == nil {
		*p = ports
	}
	return err
}

// String writes the ports as [ParsePorts] reads them.
func (p Ports) String() string {
	var b strings.Builder
	for i := 0; i < len(p); {
		last := i
		for last+1 < len(p) && p[last+1] == p[last]+1 {
			last++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(p[i]))
		if last > i {
			b.WriteString("-" + strconv.Itoa(p[last]))
		}
		i = last + 1
	}
	return b.String()
}
