"""Pictures of a run: pages, charts, graphs, traces.

Reading order: html, charts, canvas, svg, device_chart, step_graph, planned_step, graph_svg, perfetto.
"""
