// SPDX-License-Identifier: Apache-2.0

package jsonedit

// ValueKind is the sort of a JSON value.
type ValueKind uint8

// The sorts of value, and Invalid for what starts like none of them.
const (
	Invalid ValueKind = iota
	Null
	Bool
	Number
	String
	Object
	Array
)

var kindNames = [...]string{"invalid", "null", "bool", "number", "string", "object", "array"}

func (k ValueKind) String() string {
	if int(k) >= len(kindNames) {
		return kindNames[Invalid]
	}
	return kindNames[k]
}

// Kind tells the sort of a value by its first byte that is not white space. It does not check the rest: values from a
// Doc have been checked as far as Parse promises.
func Kind(raw []byte) ValueKind {
	i := skipSpace(raw, 0)
	if i == len(raw) {
		return Invalid
	}
	switch c := raw[i]; c {
	case 'n':
		return Null
	case 't', 'f':
		return Bool
	case '"':
		return String
	case '{':
		return Object
	case '[':
		return Array
	default:
		if c == '-' || isDigit(c) {
			return Number
		}
		return Invalid
	}
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// integerEnd returns the place after the integer part of a number at b[i], -1 if there is none.
func integerEnd(b []byte, i int) int {
	if i < len(b) && b[i] == '-' {
		i++
	}
	if i == len(b) || !isDigit(b[i]) {
		return -1
	}
	if b[i] == '0' { // no digits may follow a leading zero
		return i + 1
	}
	return digitsEnd(b, i)
}

func digitsEnd(b []byte, i int) int {
	for i < len(b) && isDigit(b[i]) {
		i++
	}
	return i
}

// numberEnd returns the place after the number at b[i], -1 if there is none.
func numberEnd(b []byte, i int) int {
	if i = integerEnd(b, i); i < 0 {
		return -1
	}
	if i < len(b) && b[i] == '.' {
		i++
		if end := digitsEnd(b, i); end > i {
			i = end
		} else {
			return -1
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if end := digitsEnd(b, i); end > i {
			i = end
		} else {
			return -1
		}
	}
	return i
}

// literalEnd returns the place after null, true or false at b[i], -1 if none of them stands there.
func literalEnd(b []byte, i int) int {
	for _, lit := range [...]string{"null", "true", "false"} {
		if end := i + len(lit); end <= len(b) && string(b[i:end]) == lit {
			return end
		}
	}
	return -1
}
