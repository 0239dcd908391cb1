// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// maxNesting is how deep a configuration may be nested. No real one comes near it, and each level costs time to decode.
const maxNesting = 100

// Decode decodes one JSON object strictly into dst, a pointer to a struct with json tags. A member that is absent or
// null keeps the value that dst has already. Empty raw is an object without members. Names are matched exactly.
//
// Decode refuses unknown members (the remedy names the nearest known one), members given twice, and values of the wrong
// type or out of range. It reports all faults at once, each a *[FieldError]; dst is then partly filled and not to be
// used. Members may be structs, pointers, slices, maps with string keys, strings, booleans, numbers, any, and every
// type that decodes its own JSON or text ([Duration], [Quantity], json.RawMessage). A whole number may have an exponent
// (1e3).
func Decode(raw json.RawMessage, dst any) error {
	v := reflect.ValueOf(dst)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("config: Decode needs a pointer to a struct, got %T", dst)
	}
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	if tooDeep(raw) {
		return &FieldError{Problem: "is nested too deeply",
			Remedy: fmt.Sprintf("at most %d levels are read", maxNesting)}
	}
	if !json.Valid(raw) {
		return &FieldError{Problem: "is not JSON", Remedy: "write one JSON object"}
	}
	var d decoder
	d.structure("", raw, v.Elem())
	return errors.Join(d.faults...)
}

func tooDeep(raw []byte) bool {
	depth, inString := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxNesting {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}

// decoder collects the faults of one document.
type decoder struct{ faults []error }

func (d *decoder) fault(path, problem, remedy string) {
	d.faults = append(d.faults, &FieldError{Path: path, Problem: problem, Remedy: remedy})
}

var (
	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// value decodes raw, which is valid JSON, into v.
func (d *decoder) value(path string, raw []byte, v reflect.Value) {
	if kindOf(raw) == "null" {
		return
	}
	if d.custom(path, raw, v) {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		// A new value: what the old pointer points to may be shared with other configurations.
		p := reflect.New(v.Type().Elem())
		if !v.IsNil() {
			p.Elem().Set(v.Elem())
		}
		before := len(d.faults)
		if d.value(path, raw, p.Elem()); len(d.faults) == before {
			v.Set(p) // else a later check would take the zero value for a configured one
		}
	case reflect.Struct:
		d.structure(path, raw, v)
	case reflect.Slice, reflect.Array:
		d.list(path, raw, v)
	case reflect.Map:
		d.mapping(path, raw, v)
	case reflect.Interface:
		d.free(path, raw, v)
	default:
		d.scalar(path, raw, v)
	}
}

// custom decodes types that read their own JSON or text, and reports whether v is one.
func (d *decoder) custom(path string, raw []byte, v reflect.Value) bool {
	if v.Kind() == reflect.Pointer || !v.CanAddr() {
		return false
	}
	var err error
	switch p := v.Addr(); {
	case p.Type().Implements(jsonUnmarshaler):
		err = p.Interface().(json.Unmarshaler).UnmarshalJSON(raw) //nolint:errcheck // the case asked for this type
	case p.Type().Implements(textUnmarshaler):
		var s string
		if kindOf(raw) != "string" {
			err = wrongKind(raw, "a string", stringRemedy(raw))
		} else if err = json.Unmarshal(raw, &s); err == nil {
			u := p.Interface().(encoding.TextUnmarshaler) //nolint:errcheck // the case asked for this type
			err = u.UnmarshalText([]byte(s))
		}
	default:
		return false
	}
	for _, fe := range FieldErrors(err) {
		d.faults = append(d.faults, fe.In(path))
	}
	return true
}

func (d *decoder) structure(path string, raw []byte, v reflect.Value) {
	fields := map[string]reflect.Value{}
	structFields(v, fields)
	known := make([]string, 0, len(fields))
	for name := range fields {
		known = append(known, name)
	}
	slices.Sort(known)
	d.object(path, raw, func(name, at string, value []byte) {
		f, ok := fields[name]
		if !ok {
			d.fault(at, "unknown field", Suggest(name, known))
			return
		}
		d.value(at, value, f)
	})
}

// structFields collects the settable fields of a struct by their JSON names, those of embedded structs included; the
// outer one wins.
func structFields(v reflect.Value, fields map[string]reflect.Value) {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct {
			inner := map[string]reflect.Value{}
			structFields(v.Field(i), inner)
			for n, fv := range inner {
				if _, taken := fields[n]; !taken {
					fields[n] = fv
				}
			}
			continue
		}
		if !f.IsExported() || name == "-" {
			continue
		}
		if name == "" {
			name = f.Name
		}
		fields[name] = v.Field(i)
	}
}

// object calls member for each member of the object raw, and reports members that are given twice.
func (d *decoder) object(path string, raw []byte, member func(name, at string, value []byte)) {
	if kindOf(raw) != "object" {
		d.faults = append(d.faults, wrongKind(raw, "an object", "write its members by name").In(path))
		return
	}
	seen := map[string]bool{}
	dec := json.NewDecoder(bytes.NewReader(raw))
	_, err := dec.Token()
	for err == nil && dec.More() {
		var key json.Token
		var value json.RawMessage
		if key, err = dec.Token(); err != nil {
			break
		}
		if err = dec.Decode(&value); err != nil {
			break
		}
		name, _ := key.(string)
		at := FieldPath(path, name)
		if seen[name] {
			d.fault(at, "is given twice", "keep one of the two")
			continue
		}
		seen[name] = true
		member(name, at, value)
	}
	if err != nil {
		d.fault(path, "is not JSON", "")
	}
}

func (d *decoder) list(path string, raw []byte, v reflect.Value) {
	var items []json.RawMessage
	if kindOf(raw) != "list" || json.Unmarshal(raw, &items) != nil {
		d.faults = append(d.faults, wrongKind(raw, "a list", "put it in [ ]").In(path))
		return
	}
	out := v
	if v.Kind() == reflect.Slice {
		out = reflect.MakeSlice(v.Type(), len(items), len(items))
	} else if len(items) != v.Len() {
		d.fault(path, "has the wrong number of members", fmt.Sprintf("write %d", v.Len()))
		return
	}
	for i, item := range items {
		at := path + "[" + strconv.Itoa(i) + "]"
		if kindOf(item) == "null" && v.Type().Elem().Kind() != reflect.Interface {
			d.fault(at, "is null", "remove it")
			continue
		}
		d.value(at, item, out.Index(i))
	}
	v.Set(out)
}

func (d *decoder) mapping(path string, raw []byte, v reflect.Value) {
	if v.Type().Key().Kind() != reflect.String {
		d.fault(path, "cannot be configured", "its keys are not strings: a mistake of the program")
		return
	}
	out := reflect.MakeMap(v.Type())
	d.object(path, raw, func(name, at string, value []byte) {
		if kindOf(value) == "null" {
			return
		}
		e := reflect.New(v.Type().Elem()).Elem()
		d.value(at, value, e)
		out.SetMapIndex(reflect.ValueOf(name).Convert(v.Type().Key()), e)
	})
	v.Set(out)
}

// free decodes into an empty interface, as encoding/json does, but with members given twice refused.
func (d *decoder) free(path string, raw []byte, v reflect.Value) {
	if v.NumMethod() != 0 {
		d.fault(path, "cannot be configured", "its type is an interface: a mistake of the program")
		return
	}
	var out any
	switch kindOf(raw) {
	case "object":
		m := map[string]any{}
		d.object(path, raw, func(name, at string, value []byte) {
			var e any
			d.value(at, value, reflect.ValueOf(&e).Elem())
			m[name] = e
		})
		out = m
	case "list":
		list := []any{}
		d.list(path, raw, reflect.ValueOf(&list).Elem())
		out = list
	default:
		if err := json.Unmarshal(raw, &out); err != nil {
			d.fault(path, "is out of range", "")
			return
		}
	}
	v.Set(reflect.ValueOf(out))
}

func (d *decoder) scalar(path string, raw []byte, v reflect.Value) {
	kind := kindOf(raw)
	switch v.Kind() {
	case reflect.String:
		var s string
		if kind != "string" || json.Unmarshal(raw, &s) != nil {
			d.faults = append(d.faults, wrongKind(raw, "a string", stringRemedy(raw)).In(path))
			return
		}
		v.SetString(s)
	case reflect.Bool:
		if kind != "boolean" {
			d.faults = append(d.faults, wrongKind(raw, "a boolean", "write true or false").In(path))
			return
		}
		v.SetBool(raw[0] == 't')
	case reflect.Float32, reflect.Float64:
		f, err := strconv.ParseFloat(string(raw), v.Type().Bits())
		if kind != "number" || err != nil {
			d.faults = append(d.faults, wrongKind(raw, "a number", "write it without quotes").In(path))
			return
		}
		v.SetFloat(f)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		d.integer(path, raw, v)
	default:
		d.fault(path, "cannot be configured", "type "+v.Type().String()+" has no JSON form: a mistake of the program")
	}
}

func (d *decoder) integer(path string, raw []byte, v reflect.Value) {
	if kindOf(raw) != "number" {
		d.faults = append(d.faults, wrongKind(raw, "a whole number", "write it without quotes").In(path))
		return
	}
	n, problem := wholeNumber(string(raw))
	switch {
	case problem != "":
		d.fault(path, problem, "write a whole number")
	case v.CanInt():
		if !n.IsInt64() || v.OverflowInt(n.Int64()) {
			d.fault(path, "is out of range", "write a whole number of at most "+strconv.Itoa(v.Type().Bits()-1)+" bits")
			return
		}
		v.SetInt(n.Int64())
	case n.Sign() < 0:
		d.fault(path, "is negative", "write a whole number from 0 on")
	case !n.IsUint64() || v.OverflowUint(n.Uint64()):
		d.fault(path, "is out of range", "write a whole number of at most "+strconv.Itoa(v.Type().Bits())+" bits")
	default:
		v.SetUint(n.Uint64())
	}
}

// wholeNumber reads a JSON number that is whole. The text's length and exponent are bounded, so that no number costs
// more to read than it can be worth.
func wholeNumber(s string) (n *big.Int, problem string) {
	if _, exp, ok := strings.Cut(strings.ToLower(s), "e"); ok {
		if e, err := strconv.Atoi(exp); err != nil || e < -maxExponent || e > maxExponent {
			return nil, "is out of range"
		}
	}
	r, ok := new(big.Rat), len(s) <= maxQuantityLen
	if ok {
		r, ok = r.SetString(s)
	}
	switch {
	case !ok:
		return nil, "is out of range"
	case !r.IsInt():
		return nil, "is not a whole number"
	}
	return r.Num(), ""
}

// kindOf names the kind of valid JSON by its first byte.
func kindOf(raw []byte) string {
	raw = bytes.TrimLeft(raw, " \t\r\n")
	if len(raw) == 0 {
		return "nothing"
	}
	switch raw[0] {
	case '{':
		return "object"
	case '[':
		return "list"
	case '"':
		return "string"
	case 't', 'f':
		return "boolean"
	case 'n':
		return "null"
	}
	return "number"
}

// withArticle are the kinds as a sentence names them.
var withArticle = map[string]string{
	"object": "an object", "list": "a list", "string": "a string", "boolean": "a boolean", "number": "a number",
}

func wrongKind(raw []byte, want, remedy string) *FieldError {
	found := kindOf(raw)
	if a, ok := withArticle[found]; ok {
		found = a
	}
	return &FieldError{Problem: "is " + found + ", not " + want, Remedy: remedy}
}

func stringRemedy(raw []byte) string {
	if k := kindOf(raw); k == "number" || k == "boolean" {
		return "put it in quotes"
	}
	return "write a string"
}
