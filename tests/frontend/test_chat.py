"""T06 to T08: templates render as transformers renders them, cannot harm, and can leave the last message open."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.frontend import template_sandbox
from headrace.frontend.chat import ChatTemplate, ChatTemplateError

CHATML = (
    "{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% endif -%}\n"
    "{% for message in messages %}\n"
    "    {% if loop.first and message.role == 'system' %}{% set ns = namespace(found=true) %}{% endif %}\n"
    "    {{- '<|im_start|>' ~ message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}\n"
    "    {% if loop.last %}{{ loop.length }}{% continue %}{% endif %}\n"
    "{% endfor %}\n"
    "{% generation %}{% endgeneration %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIMPLE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
TRIMMING = SIMPLE.replace("m.content", "m.content | trim")
TALK = [
    {"role": "system", "content": "Be kind <&'>"},
    {"role": "user", "content": "日本?"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Sure?"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "説明 <&'>", "parameters": {"a": [1, None, True]}}}
]


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_jinja_template([messages], chat_template=source, bos_token="<s>", **options)[0][0]


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize("source", [CHATML, SIMPLE, TRIMMING])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers(source: str, tools: Any, add_generation_prompt: bool) -> None:
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    assert ours(source, TALK, **options) == theirs(source, TALK, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson }}",
        "{{ tools | tojson(ensure_ascii=False, indent=2) }}",
        "{{ tools | tojson(ensure_ascii=True) }}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}",
        "{% for t in tools %}{{ t.function.description }}{% for k, v in t.items() %}{{ k }}{% endfor %}{% endfor %}",
        "{{ messages | map(attribute='content') | join('|') }}{{ messages[::-1] | length }}{{ '%s-%d' % ('a', 3) }}",
        "{% for m in messages | rejectattr('role', 'equalto', 'user') %}{{ loop.index }}{{ m.role|upper }}{% endfor %}",
        "{% set x %}{{ 1 + 2 }}{% endset %}{{ x ~ 'a' ~ 3 ~ none }}{{ '{} {:>4}'.format('a', 1) }}{{ 'a' * 2 }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') + f('b') }}{{ dict(a=1) }}{{ range(3) | list }}",
        "{{ messages[1].content.split('?')[0] | indent(2, true) | replace('日', 'n') }}{{ 'x' | center(5) }}",
    ],
)
def test_filters_are_those_of_transformers(source: str) -> None:
    """T06 and its kind."""
    assert ours(source, TALK, tools=TOOLS) == theirs(source, TALK, tools=TOOLS, add_generation_prompt=True)


def test_variables_and_null_content() -> None:
    assert ours("{{ enable_thinking }}{{ eos_token }}", TALK, enable_thinking=False) == "False"
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert ours("{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].id }}", [message]) == "False1"


# T07

NESTED = "{% set n = namespace(x=['ab']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
EVIL = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "repetition": "{{ 'a' * 50000000 }}",
    "long loop body": "{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}",
    "doubling ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling set": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "nesting": NESTED + "{{ n.x }}",
    "nesting json": NESTED + "{{ n.x | tojson | length }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "deep recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "percent": "{{ '%0999999999d' % 1 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, '9999999999') }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "json indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) | length }}",
    "replace filter": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) | length }}",
    "join": "{% set x = 'a' * 100000 %}{{ ([x] * 100000) | join | length }}",
    "join method": "{% set x = 'a' * 1000000 %}{{ x.join(x | list) | length }}",
    "map": "{{ messages | map('tojson', indent=10 ** 9) | list }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "joiner": "{{ joiner.__init__.__globals__['__builtins__'].open('CANARY', 'w').write('x') }}",
    "attr": "{{ ('' | attr('__class__') | attr('__mro__'))[1] | attr('__subclasses__')() }}",
    "format attribute": "{{ '{0.__class__.__mro__}'.format('') }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "mutation": "{{ messages.append({}) }}",
}


@pytest.mark.parametrize("name", EVIL)
def test_malicious_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)  # 2 s as shipped
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with pytest.raises(ChatTemplateError):
        text = ChatTemplate(EVIL[name].replace("CANARY", str(tmp_path / "canary"))).render(TALK)
        assert "class" not in text  # a harmless rendering would be a failure too
    assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    assert not list(tmp_path.iterdir())


def test_templates_see_data_only() -> None:
    class Sneaky:
        def write(self) -> None: ...

    with pytest.raises(ChatTemplateError, match="JSON values, not Sneaky"):
        ours(SIMPLE, [{"role": "user", "content": Sneaky()}])
    messages = [dict(message) for message in TALK]
    ours(SIMPLE, messages)
    assert messages == TALK


def test_errors_are_the_templates_own_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        ours("{{ raise_exception('roles must alternate') }}", TALK)
    with pytest.raises(ChatTemplateError, match="wrong at line 2"):
        ours("\n{% if %}", TALK)
    with pytest.raises(ChatTemplateError, match="failed on these messages"):
        ours("{{ 1 / 0 }}", TALK)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(None).render(TALK)
    for messages in ([], ["text"]):
        with pytest.raises(ChatTemplateError):
            ours(SIMPLE, messages)  # type: ignore[arg-type]


def test_a_long_conversation_is_fast() -> None:
    talk = TALK[1:] * 500
    start = time.perf_counter()
    assert ours(CHATML, talk) == theirs(CHATML, talk, add_generation_prompt=True)
    assert time.perf_counter() - start < 1


# T08


@pytest.mark.parametrize("source", [CHATML.replace("{{ loop.length }}", ""), SIMPLE, TRIMMING])
@pytest.mark.parametrize("last", ["Yes", "Yes  ", "Yes\n", "  Yes", "日本"])
def test_continues_the_last_message(source: str, last: str) -> None:
    talk = [*TALK, {"role": "assistant", "content": last}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours(source, talk, **options)
    assert text == theirs(source, talk, **options)
    assert text.count("Sure?") == 1 and text.rstrip().endswith(last.strip())
    if "trim" not in source:
        assert text.endswith(last)


def test_continues_parts() -> None:
    talk = [*TALK, {"role": "assistant", "content": [{"type": "text", "text": "Yes "}]}]
    source = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}|{% endfor %}"
    assert ours(source, talk, add_generation_prompt=False, continue_final_message=True).endswith("Sure?|Yes ")


def test_continuation_is_refused() -> None:
    talk = [*TALK, {"role": "assistant", "content": "Yes"}]
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ours(SIMPLE, talk, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="role assistant"):
        ours(SIMPLE, TALK, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="drops the last message"):
        ours("{{ messages[0].content }}", talk, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="needs text"):
        ours(SIMPLE, [{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
