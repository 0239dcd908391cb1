// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/tidwall/sjson"
)

// chatEdits are what the prefill leg of a chat request changes.
func chatEdits() []Edit {
	return []Edit{
		set("stream", "false"), del("stream_options"), set("max_tokens", "1"), set("max_completion_tokens", "1"),
		set("kv_transfer_params", `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,`+
			`"remote_block_ids":null,"remote_host":null,"remote_port":null}`),
		set("request_id", `"cmpl-0123456789abcdef"`),
	}
}

const chatTail = `,"model":"meta-llama/Llama-3.1-8B-Instruct","max_tokens":512,"stream":true,` +
	`"stream_options":{"include_usage":true},"temperature":0.7,"top_p":0.95,"user":"u-1"}`

// chat makes a body of about size bytes: messages of 1 KB with some escapes.
func chat(size int) string {
	text := strings.Repeat(`It was a \"quiet\" morning,\nand the river ran on as it always had, past the mill and `+
		`the field. `, 10)
	var b strings.Builder
	b.WriteString(`{"messages":[{"role":"system","content":"You help."}`)
	for i := 0; b.Len() < size-len(text); i++ {
		fmt.Fprintf(&b, `,{"role":%q,"content":"%s"}`, []string{"user", "assistant"}[i%2], text)
	}
	b.WriteString("]" + chatTail)
	return b.String()
}

type benchBody struct{ name, body string }

func benchBodies() []benchBody {
	const big = 5 << 20
	fill := func(unit string, size int) string { return strings.Repeat(unit, size/len(unit)) }
	return []benchBody{
		{"chat/2KB", chat(2 << 10)},
		{"chat/200KB", chat(200 << 10)},
		{"chat/1MB", chat(1 << 20)},
		{"chat/5MB", chat(big)},
		{"plain/5MB", `{"prompt":"` + fill("The river ran on past the mill. ", big) + `"` + chatTail},
		{"base64/5MB", `{"messages":[{"role":"user","content":[{"type":"image_url",` +
			`"image_url":{"url":"data:image/png;base64,` + fill("iVBORw0KGgoAAAANSUhEUgAA", big) + `"}}]}]` + chatTail},
		{"escapes/5MB", `{"prompt":"` + fill(`\n\"\u00e9`, big) + `"` + chatTail},
		{"escapes nested/5MB", `{"messages":[{"role":"user","content":"` + fill(`\"`, big) + `"}]` + chatTail},
		{"tokens/5MB", `{"prompt":[` + fill("15339, 1917, 11, 856, ", big) + `0]` + chatTail},
		{"objects/5MB", `{"messages":[` + fill(`{"role":"user","content":"hi","n":1},`, big) + `{}]` + chatTail},
	}
}

func BenchmarkParse(b *testing.B) {
	for _, c := range benchBodies() {
		b.Run(c.name, func(b *testing.B) {
			body := []byte(c.body)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			var d Doc
			for b.Loop() {
				if err := d.ParseInto(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkParseSplice(b *testing.B) {
	for _, c := range benchBodies() {
		b.Run(c.name, func(b *testing.B) {
			body := []byte(c.body)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			var d Doc
			var s Segments
			edits := chatEdits()
			for b.Loop() {
				if err := d.ParseInto(body); err != nil {
					b.Fatal(err)
				}
				d.Splice(edits, &s)
			}
		})
	}
}

// The same edits by sjson, which copies the body for each.
func BenchmarkSjson(b *testing.B) {
	for _, c := range benchBodies() {
		b.Run(c.name, func(b *testing.B) {
			body := []byte(c.body)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			edits := chatEdits()
			for b.Loop() {
				out := body
				for _, e := range edits {
					var err error
					if e.Delete {
						out, err = sjson.DeleteBytes(out, e.Name)
					} else {
						out, err = sjson.SetRawBytes(out, e.Name, e.Value)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

func BenchmarkJSONValid(b *testing.B) {
	for _, c := range benchBodies() {
		b.Run(c.name, func(b *testing.B) {
			body := []byte(c.body)
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if !json.Valid(body) {
					b.Fatal("not valid")
				}
			}
		})
	}
}
