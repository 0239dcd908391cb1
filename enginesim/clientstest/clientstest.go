// SPDX-License-Identifier: Apache-2.0

// Package clientstest lets tests of programs ask a gateway through the client libraries that its users have. Such a
// test runs in a folder beside lab/clients, whose README.md says what there is.
package clientstest

import (
	"cmp"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Names of the clients that [Start] starts.
const (
	OpenAIPython = "openai for Python"
	OpenAINode   = "openai for Node"
	OpenAIGo     = "openai-go"
	Anthropic    = "anthropic for Python"
	LangChain    = "LangChain"
	AISDK        = "Vercel AI SDK"
)

// scripts are the clients' sources in lab/clients; the one in Go is built by install.sh.
var scripts = map[string]string{OpenAIPython: "openai_python.py", Anthropic: "anthropic_python.py",
	LangChain: "langchain_python.py", OpenAINode: "openai_node.mjs", AISDK: "ai_sdk.mjs", OpenAIGo: ""}

// Question is a request as a client's user states it. What is zero has a default.
type Question struct {
	URL    string `json:"url"`    // of the gateway, without /v1
	API    string `json:"api"`    // chat (default), completions, responses or messages
	Model  string `json:"model"`  // default tiny
	Prompt any    `json:"prompt"` // text, or for completions a list of texts
	Limit  int    `json:"limit"`  // of the response, in tokens; default 12
	Stream bool   `json:"stream"`
	N      int    `json:"n"` // default 1
	Tools  []Tool `json:"tools"`
	// Schema is the JSON schema that the response is to have.
	Schema json.RawMessage `json:"schema"`
	// Leave is after how many events the client leaves a stream; 0: it does not.
	Leave   int     `json:"leave"`
	Timeout float64 `json:"timeout"` // seconds; default 20
}

// Tool is a function that the model must call.
type Tool struct {
	Name       string          `json:"name"`
	Parameters json.RawMessage `json:"parameters"`
}

// Answer is what the client's user has got. A client that left a stream says nothing.
type Answer struct {
	Texts  []string // of each choice
	Finish []string // why each choice ended, as the API says it
	Calls  []Call
	Usage  []int // tokens of the prompt and of the response; nil if the client was not told
	Error  *Failure
}

// Call is one call of a tool.
type Call struct{ Name, Arguments string }

// Failure is the exception that the client raised.
type Failure struct {
	Class   string
	Status  int    // 0 without a response
	Type    string // that the response names; anthropic alone tells it
	Message string
}

// Client is a process with one client library.
type Client struct {
	in  *json.Encoder
	out *json.Decoder
}

// Missing skips the test because a client is not installed. Where CI=true that is a failure.
func Missing(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(what, " is missing: run lab/clients/install.sh")
	}
	t.Skip(what, " is missing: run lab/clients/install.sh")
}

// Start starts a client, or skips the test.
func Start(t *testing.T, name string) *Client {
	t.Helper()
	tools, err := filepath.Abs("../../.tools/clients")
	noError(t, err)
	if _, err := os.Stat(filepath.Join(tools, ".done")); err != nil {
		Missing(t, name)
	}
	script, known := scripts[name]
	if !known {
		t.Fatal("no client is called ", name)
	}
	program, args, dir := "openai-go", []string(nil), ""
	switch filepath.Ext(script) {
	case ".py":
		program, args = "python", []string{"../../lab/clients/" + script}
	case ".mjs":
		source, err := os.ReadFile("../../lab/clients/" + script)
		noError(t, err)
		// A module that is given as text finds its packages from the working directory.
		program, args = "node", []string{"--input-type=module", "--eval", string(source)}
		dir = filepath.Join(tools, "node")
	}
	//nolint:gosec // G204: a program that install.sh has put there, with a script of this repository
	cmd := exec.CommandContext(t.Context(), filepath.Join(tools, "bin", program), args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "NO_PROXY=*", "LANGSMITH_TRACING=false")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	noError(t, err)
	out, err := cmd.StdoutPipe()
	noError(t, err)
	if err := cmd.Start(); err != nil { // an older installation
		Missing(t, name)
	}
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	return &Client{json.NewEncoder(in), json.NewDecoder(out)}
}

// Ask asks one question and waits for the answer.
func (c *Client) Ask(t *testing.T, q Question) Answer {
	t.Helper()
	q.API, q.Model = cmp.Or(q.API, "chat"), cmp.Or(q.Model, "tiny")
	q.Limit, q.N, q.Timeout = cmp.Or(q.Limit, 12), cmp.Or(q.N, 1), cmp.Or(q.Timeout, 20)
	noError(t, c.in.Encode(q))
	var a Answer
	noError(t, c.out.Decode(&a))
	return a
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
