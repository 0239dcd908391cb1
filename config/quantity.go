// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"math/big"
	"strconv"
	"strings"
)

// Quantity is an amount in Kubernetes' notation (apimachinery, resource.Quantity): "8Gi", "100M", "1.5", "2e3".
// Decoding checks it and refuses negative amounts; "" is left out. The text is kept as written, since engines' settings
// repeat it.
type Quantity string

const quantityRemedy = `write a Kubernetes quantity, like "8Gi" or "500M"`

var (
	errQuantity = errors.New("not a Kubernetes quantity")
	errTooLarge = errors.New("does not fit 63 bits")
	errNegative = errors.New("negative")
)

// suffixes are the powers that a quantity's suffix stands for: of 2 in binary, of 10 in decimal.
var (
	binarySuffixes  = map[string]int{"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
	decimalSuffixes = map[string]int{"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15,
		"E": 18}
)

// A longer text or a larger exponent cannot be an amount that fits 63 bits, and would only cost time to find out.
const (
	maxQuantityLen = 64
	maxExponent    = 60
)

// Bytes returns the amount in bytes (or bytes a second), a fraction rounded up as Kubernetes does. "" is 0.
func (q Quantity) Bytes() (int64, error) {
	if q == "" {
		return 0, nil
	}
	s := string(q)
	if len(s) > maxQuantityLen {
		return 0, errQuantity
	}
	end := 0
	for end < len(s) && strings.IndexByte("+-.0123456789", s[end]) >= 0 {
		end++
	}
	if !isDecimal(s[:end]) {
		return 0, errQuantity
	}
	n, ok := new(big.Rat).SetString(s[:end])
	if !ok {
		return 0, errQuantity
	}
	scale, err := suffixScale(s[end:])
	if err != nil {
		return 0, err
	}
	n.Mul(n, scale)
	if n.Sign() < 0 {
		return 0, errNegative
	}
	whole, rest := new(big.Int).QuoRem(n.Num(), n.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	if !whole.IsInt64() {
		return 0, errTooLarge
	}
	return whole.Int64(), nil
}

// isDecimal reports whether s is an optional sign, digits and at most one point, with one digit at least.
func isDecimal(s string) bool {
	s = strings.TrimLeft(s, "+-")
	digits, points := 0, 0
	for _, c := range s {
		switch {
		case '0' <= c && c <= '9':
			digits++
		case c == '.':
			points++
		default:
			return false
		}
	}
	return digits > 0 && points <= 1
}

func suffixScale(suffix string) (*big.Rat, error) {
	if p, ok := binarySuffixes[suffix]; ok {
		return new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(p))), nil
	}
	exp, ok := decimalSuffixes[suffix]
	if !ok {
		if suffix[0] != 'e' && suffix[0] != 'E' {
			return nil, errQuantity
		}
		var err error
		if exp, err = strconv.Atoi(suffix[1:]); err != nil || exp < -maxExponent || exp > maxExponent {
			return nil, errQuantity
		}
	}
	power := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(exp, -exp))), nil)
	if exp < 0 {
		return new(big.Rat).SetFrac(big.NewInt(1), power), nil
	}
	return new(big.Rat).SetInt(power), nil
}

// UnmarshalJSON reads a string, or a plain number as the Kubernetes API does. The error is a *[FieldError] without a
// path.
func (q *Quantity) UnmarshalJSON(raw []byte) error {
	s := string(raw)
	switch kindOf(raw) {
	case "null":
		return nil
	case "string":
		if err := json.Unmarshal(raw, &s); err != nil || s == "" {
			return &FieldError{Problem: "is not a quantity", Remedy: quantityRemedy}
		}
	case "number":
	default:
		return wrongKind(raw, "a quantity", quantityRemedy)
	}
	switch _, err := Quantity(s).Bytes(); {
	case errors.Is(err, errNegative):
		return &FieldError{Problem: "is negative", Remedy: quantityRemedy}
	case errors.Is(err, errTooLarge):
		return &FieldError{Problem: "is too large", Remedy: "write less than 8Ei"}
	case err != nil:
		return &FieldError{Problem: "is not a quantity", Remedy: quantityRemedy}
	}
	*q = Quantity(s)
	return nil
}
