"""Pictures of a run: pages, charts, graphs, traces.

Reading order: html, charts, canvas, svg, device_chart, device_rows, pipeline_rows, step_graph, planned_step,
graph_svg, perfetto.
"""
