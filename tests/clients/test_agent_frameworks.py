"""The clients that agents are written with complete a task of two tools, made to call them and of their own accord."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from redraft.engine.checkpoints import DEFAULT_MODEL

pytestmark = pytest.mark.integration

TASK = "How warm is it in Oslo? Then note it."
Degrees = Annotated[int, Field(ge=-40, le=50)]
City = Literal["Oslo", "Lima"]


class Report(BaseModel):
    """What is known in the end; bounded, so that any model comes to an end of it."""

    city: City
    degrees: Degrees


@dataclass
class Desk:
    """Two tools, and what they were called with."""

    calls: list[tuple[str, Any]] = field(default_factory=list)

    def temperature(self, city: City) -> str:
        """Tells how warm it is in a city."""
        self.calls.append(("temperature", city))
        return f"It is 7 degrees in {city}."

    def note(self, degrees: Degrees) -> str:
        """Notes a temperature."""
        self.calls.append(("note", degrees))
        return json.dumps({"noted": degrees})

    def assert_done(self) -> None:
        assert self.calls == [("temperature", "Oslo"), ("note", 7)]


ORDER = ("temperature", "note")


ways = pytest.mark.parametrize(
    ("stream", "forced"),
    [
        pytest.param(False, True, id="whole-forced"),
        pytest.param(True, True, id="stream-forced"),
        pytest.param(False, False, id="whole-free"),
        pytest.param(True, False, id="stream-free"),
    ],
)
"""Answers at once or streamed; every step forced, or calls and their end left to the model."""


@ways
def test_openai(deployment: str, stream: bool, forced: bool) -> None:
    from openai import OpenAI, pydantic_function_tool

    class temperature(BaseModel):
        """Tells how warm it is in a city."""

        city: City

    class note(BaseModel):
        """Notes a temperature."""

        degrees: Degrees

    desk = Desk()
    tools = [pydantic_function_tool(temperature), pydantic_function_tool(note)]
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": TASK}]
    with OpenAI(base_url=deployment, api_key="none", max_retries=0) as client:
        for name in (*ORDER, None):
            fields: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": messages, "tools": tools}
            fields |= {"max_tokens": 60, "temperature": 0}
            if forced and name:
                fields["tool_choice"] = {"type": "function", "function": {"name": name}}
            elif forced:
                fields |= {"tool_choice": "none", "response_format": Report}
            if stream:
                with client.chat.completions.stream(**fields) as events:
                    events.until_done()
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.parse(**fields).choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                assert isinstance(call.function.parsed_arguments, (temperature, note))
                tool: Callable[..., str] = getattr(desk, call.function.name)
                answer = tool(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    desk.assert_done()
    assert message.content
    assert isinstance(message.parsed, Report) == forced


@ways
def test_openai_agents(deployment: str, stream: bool, forced: bool) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        RunHooks,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    desk = Desk()

    class Next(RunHooks):
        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: object) -> None:
            if forced:
                done = len(desk.calls)
                agent.model_settings.tool_choice = ORDER[done] if done < len(ORDER) else "none"

    async def main() -> str:
        async with AsyncOpenAI(base_url=deployment, api_key="none", max_retries=0) as client:
            agent = Agent(
                name="clerk",
                instructions="Be brief.",
                tools=[function_tool(desk.temperature), function_tool(desk.note)],
                model=OpenAIChatCompletionsModel(model=DEFAULT_MODEL, openai_client=client),
                model_settings=ModelSettings(tool_choice=ORDER[0] if forced else "auto", max_tokens=40, temperature=0),
                reset_tool_choice=False,
            )
            if not stream:
                return str((await Runner.run(agent, TASK, hooks=Next())).final_output)
            result = Runner.run_streamed(agent, TASK, hooks=Next())
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    assert asyncio.run(main())
    desk.assert_done()


@ways
def test_langchain(deployment: str, stream: bool, forced: bool) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    desk = Desk()
    tools = {"temperature": tool(desk.temperature), "note": tool(desk.note)}
    model = ChatOpenAI(
        model=DEFAULT_MODEL,
        base_url=deployment,
        api_key="none",
        max_retries=0,
        max_tokens=40,
        temperature=0,
        stream_usage=True,
    )
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage(TASK)]
    for name in (*ORDER, "none"):
        bound = model.bind_tools(list(tools.values()), tool_choice=name if forced else "auto")
        if stream:
            chunks = list(bound.stream(messages))
            message: Any = chunks[0]
            for chunk in chunks[1:]:
                message += chunk
        else:
            message = bound.invoke(messages)
        messages.append(message)
        for call in message.tool_calls:
            answer = tools[call["name"]].invoke(call["args"])
            messages.append(ToolMessage(answer, tool_call_id=call["id"]))
    desk.assert_done()
    assert message.content
    assert message.usage_metadata["output_tokens"] > 0


def test_langchain_structured_output(deployment: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=DEFAULT_MODEL, base_url=deployment, api_key="none", max_retries=0, max_tokens=60, temperature=0
    )
    for method in ("json_schema", "function_calling"):
        weather = model.with_structured_output(Report, method=method).invoke(TASK)
        assert isinstance(weather, Report)


@ways
def test_pydantic_ai(deployment: str, stream: bool, forced: bool) -> None:
    from pydantic_ai import Agent, NativeOutput, RunContext
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    desk = Desk()

    class Forced(AbstractCapability[None]):
        def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
            def settings(context: RunContext[None]) -> ModelSettings:
                step = context.run_step - 1
                return ModelSettings(tool_choice=[ORDER[step]] if step < len(ORDER) else "none")

            return settings

    async def main() -> object:
        provider = OpenAIProvider(base_url=deployment, api_key="none")
        agent = Agent(
            OpenAIChatModel(DEFAULT_MODEL, provider=provider),
            output_type=NativeOutput(Report) if forced else str,
            instructions="Be brief.",
            tools=[desk.temperature, desk.note],
            capabilities=[Forced()] if forced else [],
            model_settings=ModelSettings(max_tokens=60, temperature=0),
        )
        async with provider.client:
            if not stream:
                return (await agent.run(TASK)).output
            async with agent.run_stream(TASK) as result:
                return await result.get_output()

    assert isinstance(asyncio.run(main()), Report if forced else str)
    desk.assert_done()
